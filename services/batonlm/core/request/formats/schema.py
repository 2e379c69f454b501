"""What formats with text values need to know of a tool's parameters: which there are, and of which
types their values may be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.formats.lark import schema_of
from batonlm.core.request.formats.reader import AnswerText, Malformed, Schema
from batonlm.core.request.formats.values import python_value
from batonlm.core.request.request import Tool

ALL_KINDS = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$defs", "definitions", "format", "strict"}
)
"""Keywords that restrict nothing."""

_MAX_NESTED = 16
"""Most references and alternatives within each other that are followed."""

_VALUE_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


def cannot_write(what: str) -> InvalidArgument:
    return InvalidArgument(f"tools has {what} in this model's format of calls", field="tools")


def refuse_others(schema: Schema, *known: str) -> None:
    """Raises InvalidArgument (`tools`) for a keyword that is not among the known ones and restricts
    values."""
    for key in schema:
        if key not in known and key not in _NOTES and not key.startswith("x-"):
            raise cannot_write(f"a schema whose keyword {key[:40]!r} cannot be followed")


def resolved(schema: Any, root: Schema) -> Schema:
    """Returns the schema that a reference names, or the schema itself. True and other values that
    are no schema count as an empty one."""
    for _ in range(_MAX_NESTED):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, dict) else None
    return {}


def alternatives(schema: Any, root: Schema) -> Iterator[Schema]:
    """Yields the schemas of which a value may follow any one."""
    pending = [(schema, 0)]
    while pending:
        schema, nested = pending.pop()
        schema = resolved(schema, root)
        inner = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(inner, list) and nested < _MAX_NESTED:
            pending += [(each, nested + 1) for each in reversed(inner)]
        else:
            yield schema


def kinds_of(schema: Any, root: Schema) -> frozenset[str]:
    """Returns the types of JSON that a schema allows."""
    kinds = frozenset[str]()
    for each in alternatives(schema, root):
        kinds |= _own_kinds(each, root)
    return kinds


def _own_kinds(schema: Schema, root: Schema) -> frozenset[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named}) & ALL_KINDS or ALL_KINDS
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str)) & ALL_KINDS or ALL_KINDS
    given = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(given, list) and given:
        return frozenset(_VALUE_KINDS[type(each)] for each in given)
    parts = schema.get("allOf")
    if isinstance(parts, list):
        kinds = ALL_KINDS
        for part in parts:
            part = resolved(part, root)
            if "allOf" not in part:
                kinds &= kinds_of(part, root)
        return kinds or ALL_KINDS
    if "properties" in schema:
        return frozenset({"object"})
    return ALL_KINDS


def typed(text: str, kinds: frozenset[str]) -> str:
    """Returns the JSON of a value that stands as text: what the text says as a literal of JSON or
    Python, where that is of an allowed type, else a string."""
    literal = _literal(text.strip())
    if literal is None:
        return json.dumps(text, ensure_ascii=False)
    kind = _VALUE_KINDS[type(json.loads(literal))]
    as_string = "string" in kinds
    if as_string and (kind == "string" or kind not in kinds | _wider(kinds)):
        return json.dumps(text, ensure_ascii=False)
    return literal


def _wider(kinds: frozenset[str]) -> frozenset[str]:
    return frozenset({"integer"}) if "number" in kinds else frozenset()


def _literal(text: str) -> str | None:
    """Returns the JSON of a literal, or None for another text."""
    reading, parts = AnswerText(), list[str]()
    reading.add(text)
    reading.end()
    try:
        for _ in python_value(reading, parts.append):
            raise AssertionError("a whole text waits for nothing")
    except Malformed:
        return None
    return "".join(parts) if reading.at_end else None


class Parameter(NamedTuple):
    """One parameter of a tool."""

    name: str
    schema: Any
    """May refer to definitions of the tool's."""
    required: bool


def parameters_of(tool: Tool) -> tuple[Schema, Sequence[Parameter]]:
    """Returns the schema of a tool and its parameters in their order. Raises InvalidArgument
    (`tools`) when these are not all that the schema asks for."""
    root = schema_of(tool)
    schema = resolved(root, root)
    refuse_others(schema, "type", "properties", "required", "additionalProperties")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    others = schema.get("additionalProperties")
    unnamed = [name for name in required if name not in properties]
    names = [*properties, *unnamed]
    return root, [Parameter(name, properties.get(name, others), name in required) for name in names]


def definitions(root: Schema) -> Schema:
    """Returns the part of a tool's schema to which a parameter's may refer."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
