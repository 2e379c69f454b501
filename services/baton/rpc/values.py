"""Turns one given value into a field's type and checks its range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from baton.core.errors import InvalidArgument

_BOOLS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One field: its name, its type, and what `option` was told about it."""

    name: str
    type: Any
    default: Any
    help: str
    unit: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    required: bool
    secret: bool

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        if self.type is bool:
            return "true or false"
        if names := self.choices or _members(self.type):
            return "one of " + ", ".join(names)
        if self.type is str:
            return "text"
        if self.type in (int, float):
            kind = "a whole number" if self.type is int else "a number"
            return kind + self._range()
        return "a list of texts, comma separated"

    def _range(self) -> str:
        low, high = self.minimum, self.maximum
        if low is not None and high is not None:
            return f" from {_number(low)} to {_number(high)}"
        if low is not None:
            return f", at least {_number(low)}"
        return "" if high is None else f", at most {_number(high)}"


def parse(option: Option, value: object, source: str) -> Any:
    """The value in the field's type. `value` is a text, or what TOML made of it.

    Raises InvalidArgument that names field, value, source and what is allowed.
    """
    try:
        return _check(option, _convert(option, value))
    except (ValueError, KeyError, OverflowError):
        shown = "the value" if option.secret else repr(value)
        raise InvalidArgument(
            f"{shown} (from {source}) is not allowed; must be {option.allowed}", field=option.name
        ) from None


def render(option: Option, value: object) -> str:
    """The value as text that `parse` reads back; masked when secret."""
    if option.secret and value:
        return "***"
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value) or "''"
    return str(value) or "''"


def _convert(option: Option, value: object) -> object:
    """`value` in the option's type, or ValueError, KeyError, OverflowError."""
    if option.type is bool:
        return value if isinstance(value, bool) else _BOOLS.get(_text(value).lower())
    if option.type is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return int(_text(value))
    if option.type is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return float(_text(value))
    if option.type is str:
        return _text(value)
    if _members(option.type):
        return option.type[_text(value).upper()]
    if isinstance(value, list):
        return tuple(_text(item) for item in value)
    return tuple(item.strip() for item in _text(value).split(",") if item.strip())


def _check(option: Option, value: object) -> object:
    """The value if it is in range, or ValueError."""
    if value is None:
        raise ValueError
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError
        if option.minimum is not None and value < option.minimum:
            raise ValueError
        if option.maximum is not None and value > option.maximum:
            raise ValueError
    if option.choices:
        given = value if isinstance(value, tuple) else (value,)
        if not set(given) <= set(option.choices):
            raise ValueError
    return value


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value.strip()


def _members(kind: Any) -> tuple[str, ...]:
    """The names of an Enum in lower case; () for any other type."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.name.lower() for member in kind)
    return ()
