"""Random JSON schemas, of what llguidance follows, whose answers stay short."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.text("abcdefgh_ \"\\äß日😀'", min_size=1, max_size=6)
_PATTERNS = st.sampled_from(
    ["^[a-z]{1,8}$", "^(red|green|blue)$", "^[0-9]{2}-[A-F]{2}$", "a+b", "^\\d{1,3}\\.\\d$"]
)


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    match draw(st.sampled_from(["short", "between", "pattern", "date", "uuid"])):
        case "short":
            return {"type": "string", "maxLength": draw(st.integers(0, 12))}
        case "between":
            low = draw(st.integers(0, 6))
            return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 6))}
        case "pattern":
            return {"type": "string", "pattern": draw(_PATTERNS), "maxLength": 20}
        case name:
            return {"type": "string", "format": name}


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    low = draw(st.integers(-1000, 1000))
    if draw(st.booleans()):
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["exclusiveMaximum"] = low + draw(st.integers(2, 500))
    return schema


_FIXED = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.lists(st.one_of(st.none(), st.integers(-9, 99), _NAMES), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.one_of(_NAMES, st.booleans(), st.just([1, {"a": None}])).map(lambda value: {"const": value}),
)


def _containers(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(_objects(inner), _arrays(inner), _unions(inner))


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))
    required = [name for name in names if draw(st.booleans())]
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    low = draw(st.integers(0, 2))
    return {
        "type": "array",
        "items": draw(inner),
        "minItems": low,
        "maxItems": low + draw(st.integers(0, 2)),
    }


@st.composite
def _unions(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}


_PARTS = st.recursive(st.one_of(_strings(), _numbers(), _FIXED), _containers, max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Some name parts of themselves, and one kind calls itself."""
    match draw(st.sampled_from(["plain", "plain", "named", "chain"])):
        case "plain":
            return draw(_PARTS)
        case "named":
            use = {"$ref": "#/$defs/part"}
            return {
                "$defs": {"part": draw(_PARTS)},
                "type": "object",
                "properties": {"one": use, "two": use},
                "required": ["one", "two"],
                "additionalProperties": False,
            }
        case _:
            link = {
                "type": "object",
                "properties": {
                    "value": draw(_PARTS),
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
            return {"$defs": {"link": link}, "$ref": "#/$defs/link"}
