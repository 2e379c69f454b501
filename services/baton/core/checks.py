"""Checks of single values, for whoever validates what clients sent; knows no request."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import InvalidArgument


def check_length(field: str, items: Sequence[object], most: int, noun: str) -> None:
    if len(items) > most:
        raise wrong(field, f"must have at most {most} {noun}")


def check_text(field: str, text: str, most: int) -> int:
    """The text's size in UTF-8 bytes. Refuses lone surrogates, which no wire can carry."""
    if len(text) > most:
        raise wrong(field, f"must have at most {most} bytes")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise wrong(field, "is not valid Unicode text") from None
    if size > most:
        raise wrong(field, f"must have at most {most} bytes")
    return size


def wrong(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field)
