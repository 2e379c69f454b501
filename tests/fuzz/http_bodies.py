"""Strategies for JSON bodies, made from the types that the HTTP API decodes them into."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

_NUMBERS = st.sampled_from(
    (
        0,
        1,
        -1,
        2,
        16,
        17,
        128,
        2**31 - 1,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        0.5,
        -0.0,
        1e308,
    )
) | st.integers(-2, 30)
_TEXTS = st.sampled_from(
    (
        "",
        "a",
        "hi there",
        "\0",
        "\ud800",
        "\u202e\U0001f600",
        "{{ 7 * 7 }}",
        r'{"a": ["\ud800"]}',
        r'"\udc00\ud800"',
        "user",
        "system",
        "assistant",
        "text",
        "x" * 300,
        "x" * 20_000,
    )
) | st.text(max_size=8)
_BRIEF = {"max_tokens": st.sampled_from((1, 1, 2, 4, 4, 0, -1, 2**31))}
"""Given nearly always: an answer otherwise fills the model's context, and takes as long."""

_ANY = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS | st.sampled_from((float("nan"), float("inf"))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    """Serialized objects with some of the fields of a struct, most of them of the right type."""
    return _value(inspect.type_info(kind)).map(_encoded)


def _encoded(value: Any) -> bytes:
    """With NaN and the infinities, which are no JSON, and lone surrogates as escapes."""
    return json.dumps(value).encode()


def _value(kind: inspect.Type) -> st.SearchStrategy[Any]:
    return st.one_of(*[_right(kind)] * 6, _ANY)


def _right(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            required = {f.encode_name: _value(f.type) for f in kind.fields if f.required}
            optional = {f.encode_name: _value(f.type) for f in kind.fields if not f.required}
            brief = {name: _BRIEF[name] for name in optional.keys() & _BRIEF.keys()}
            known = st.fixed_dictionaries(required | brief)
            names = (
                st.lists(st.sampled_from(sorted(optional)), max_size=4) if optional else st.just([])
            )
            some = names.flatmap(
                lambda picked: st.fixed_dictionaries({n: optional[n] for n in picked})
            )
            odd = st.dictionaries(_TEXTS, _ANY, max_size=1)
            return st.builds(lambda one, two, three: three | one | two, known, some, odd)
        case inspect.UnionType():
            return st.one_of([_right(part) for part in kind.types])
        case inspect.ListType():
            return st.lists(_value(kind.item_type), max_size=4)
        case inspect.DictType():
            keys = st.integers(-2, 99).map(str) | _TEXTS
            return st.dictionaries(keys, _value(kind.value_type), max_size=4)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType() | inspect.FloatType():
            return _NUMBERS
        case inspect.StrType():
            return _TEXTS
        case inspect.NoneType():
            return st.none()
        case _:
            return _ANY
