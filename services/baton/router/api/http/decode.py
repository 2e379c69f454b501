"""Bytes of a JSON body to a typed struct and the names of parameters that have no effect.

Strict about types; says which field is at fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from baton.core.errors import InvalidArgument

Body = TypeVar("Body", bound=msgspec.Struct)

_JSON_WORDS = {"int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean"} | {
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_MISMATCH = re.compile(r"Expected `([a-z |]+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r"`\$([\w.\[\]]*)`")
_NON_FINITE = object()
_NAME = re.compile(r"\w{1,64}", re.ASCII)
"""What an error may repeat of a client's own names: others cannot always be said again in JSON."""


def decode(
    body: bytes, kind: type[Body], refused: Mapping[str, tuple[object, ...]]
) -> tuple[Body, tuple[str, ...]]:
    """The body as `kind` and the names of its parameters that `kind` lacks, sorted.

    Raises InvalidArgument for what is no JSON object, for a wrong type, and for a parameter in
    `refused` that `kind` lacks, of a value that is neither null nor listed there.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the body is not valid UTF-8") from None
    try:
        parameters = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        given = {name for name, raw in parameters.items() if bytes(raw) != b"null"}
        applied = set(kind.__struct_fields__)
        for name in sorted((given & refused.keys()) - applied):
            if msgspec.json.decode(parameters[name]) not in refused[name]:
                raise InvalidArgument(f"{name} is not supported", field=name)
        parsed = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error)) from None
    except msgspec.DecodeError:
        raise _malformed(text) from None
    except RecursionError:
        raise InvalidArgument("the body is nested too deeply") from None
    return parsed, tuple(sorted(given - refused.keys() - applied))


def _mismatch(report: str) -> InvalidArgument:
    """Our words for msgspec's report of a value that does not fit its type."""
    path = _PATH.search(report)
    field = path[1].lstrip(".").removesuffix("[...]") if path else ""
    if missing := _MISSING.search(report):
        field = f"{field}.{missing[1]}".lstrip(".")
        return InvalidArgument(f"{field} is required", field=field)
    if "`key` in" in report:
        return InvalidArgument(f"{field} must have integers as keys", field=field)
    if expected := _MISMATCH.search(report):
        words = [_JSON_WORDS.get(word, word) for word in expected[1].split(" | ")]
        kinds = " or ".join(word for word in words if word != "null")
        return InvalidArgument(f"{field or 'the body'} must be {kinds}", field=field)
    return InvalidArgument(f"{field or 'the body'} has a value out of range", field=field)


def _malformed(text: str) -> InvalidArgument:
    """NaN and the infinities are no JSON, yet clients send them: then the field is named."""
    try:
        value = json.loads(text, parse_constant=lambda _: _NON_FINITE)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        for name, part in value.items():
            if _NAME.fullmatch(name) and _has_non_finite(part):
                return InvalidArgument(f"{name} must be a finite number", field=name)
    return InvalidArgument("the body is not valid JSON")


def _has_non_finite(value: object) -> bool:
    pending = [value]
    while pending:
        part = pending.pop()
        if part is _NON_FINITE:
            return True
        if isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
    return False
