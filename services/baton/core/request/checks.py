"""Checks of single values, for whoever validates what clients sent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from baton.core.errors import InvalidArgument

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape in JSON that is half a character, or one of two that are a whole one."""


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


def check_json_text(field: str, text: str) -> None:
    """Of a text that is read as JSON later, and used as it is if it is none. Refuses JSON with an
    escape of half a character, which is no valid text once it is read."""
    if not _SURROGATE.search(text):
        return
    try:
        whole = is_whole(json.loads(text))
    except (ValueError, RecursionError):
        return
    if not whole:
        raise wrong(field, "must have no escape of half a character")


def is_whole(value: Any) -> bool:
    """Whether every text in a value of JSON, keys too, is of whole characters. Raises
    RecursionError."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def wrong(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field)
