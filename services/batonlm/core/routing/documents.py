"""Checks the values of JSON documents that operators write, such as the file of aliases.

Each raises InvalidArgument whose field is the value's place in the document.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from batonlm.core.errors import InvalidArgument

MAX_NAME = 200


def checked_object(value: object, where: str, known: Collection[str] = ()) -> dict[str, Any]:
    """Returns an object that has none but the known keys; empty: any."""
    if not isinstance(value, dict):
        raise InvalidArgument("must be an object", field=where)
    for key in value:
        if known and key not in known:
            raise InvalidArgument(f"has no {key[:80]!r}", field=where)
    return value


def checked_name(name: object, where: str) -> str:
    """Returns a name that is fit for metrics and logs."""
    if not isinstance(name, str):
        raise InvalidArgument("must be a text", field=where)
    if not (0 < len(name) <= MAX_NAME and name.isprintable() and name.isascii()):
        raise InvalidArgument(
            f"{name[:80]!r} must be 1 to {MAX_NAME} printable ASCII characters", field=where
        )
    return name


def checked_number(value: object, where: str, least: float, most: float) -> float:
    """Returns a finite number within the bounds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise InvalidArgument(f"must be a number from {least:g} to {most:g}", field=where)
