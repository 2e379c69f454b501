"""Strategies for serialized messages of any protobuf type, made from its descriptor alone.

They write the wire format themselves, so that also what no protobuf library would write comes out:
text that is no UTF-8, enum values that nobody knows, fields of another wire type, unknown fields.
`Words` says what is worth writing into a field of some name, which is how the messages get past the
first check.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

Words = Mapping[str, Sequence[bytes | int]]
"""By field name: values that mean something to who receives them."""

ONLY_WORDS = frozenset({"address"})
"""Names of fields that get nothing else: workers connect to an address, whosever it is."""

MAX_DEPTH = 4
HUGE = 20_000
_ENOUGH = 1 << 17
"""Bytes that repetition may make of one field: it repeats what is repeated inside."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_F = FieldDescriptor
_INTEGERS = {
    _F.TYPE_INT32: 32,
    _F.TYPE_UINT32: 32,
    _F.TYPE_SINT32: 32,
    _F.TYPE_INT64: 64,
    _F.TYPE_UINT64: 64,
    _F.TYPE_SINT64: 64,
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf)
_TEXTS = (
    b"",
    b"a",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    "é\u202e\U0001f600".encode(),
    b"{{ 7 * 7 }}",
    rb'{"a": ["\ud800"]}',
    rb'"\udc00\ud800"',
    b"%s%n" * 8,
    b"x" * 300,
    b"x" * HUGE,
)
_SIZES = (0, 1, 3, 4, 8, 15, 16, 17, 20, 32, 64, 1025, HUGE)
_SMALL = st.integers(0, 4)


def varint(value: int) -> bytes:
    """Base 128, negative numbers as 64 bits in two's complement."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tagged(number: int, wire_type: int, payload: bytes) -> bytes:
    return varint(number << 3 | wire_type) + payload


def delimited(number: int, payload: bytes) -> bytes:
    return tagged(number, _BYTES, varint(len(payload)) + payload)


def messages(kind: Descriptor, words: Words, depth: int = MAX_DEPTH) -> st.SearchStrategy[bytes]:
    """Serialized messages of a type: a few of its fields each, rarely something it does not have.

    Appended to a valid message they overwrite what they name, as protobuf merges.
    """
    fields = [_field(field, words, depth) for field in kind.fields]
    odd = _unknown_fields(kind)
    parts = (
        st.lists(st.sampled_from(fields).flatmap(_itself), max_size=6) if fields else st.just([])
    )
    return st.builds(lambda known, extra: b"".join(known) + extra, parts, odd)


def _itself(strategy: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return strategy


def _unknown_fields(kind: Descriptor) -> st.SearchStrategy[bytes]:
    unknown = max((field.number for field in kind.fields), default=0) + 1
    return st.sampled_from(
        (
            *(b"",) * 12,
            tagged(unknown, _VARINT, varint(2**64 - 1)),
            delimited(unknown, b"\xff" * 9),
            delimited(536_870_911, b""),
            tagged(unknown, 3, tagged(unknown, 4, b"")),
            tagged(unknown, 3, b"") * 150,
        )
    )


def _field(field: FieldDescriptor, words: Words, depth: int) -> st.SearchStrategy[bytes]:
    """One field once, sometimes many times, sometimes as if it were of another type."""
    number = field.number
    payload, wire_type = _payloads(field, words, depth)
    whole = payload.map(lambda value: tagged(number, wire_type, value))
    other = tagged(number, _BYTES if wire_type != _BYTES else _VARINT, varint(5) + b"12345")
    choices = [whole] * 8 + [st.just(other)]
    if field.is_repeated:
        counts = st.sampled_from((0, 2, 3, 17, 300))
        choices += [
            st.builds(lambda one, count: one * min(count, _ENOUGH // (len(one) + 1)), whole, counts)
        ] * 2
        if wire_type != _BYTES:
            packed = st.builds(
                lambda values, count: delimited(number, b"".join(values) * count),
                st.lists(payload, max_size=6),
                st.sampled_from((1, 1, 1, 2, HUGE // 4)),
            )
            choices += [packed] * 3
    return st.one_of(choices)


def _payloads(
    field: FieldDescriptor, words: Words, depth: int
) -> tuple[st.SearchStrategy[bytes], int]:
    """What follows the tag, and the wire type that the tag has to name."""
    if field.type in _INTEGERS:
        return _integers(field, words), _VARINT
    if field.type == _F.TYPE_FLOAT:
        return st.sampled_from(_FLOATS).map(lambda value: struct.pack("<f", value)), _FIXED32
    if field.type == _F.TYPE_DOUBLE:
        return st.sampled_from(_FLOATS).map(lambda value: struct.pack("<d", value)), _FIXED64
    if field.type == _F.TYPE_BOOL:
        return st.sampled_from((b"\0", b"\1", b"\2", varint(-1))), _VARINT
    if field.type == _F.TYPE_ENUM:
        assert field.enum_type is not None
        known = [value.number for value in field.enum_type.values]
        numbers = st.sampled_from((*known, max(known) + 1, 99, -1, 2**31 - 1))
        return numbers.map(varint), _VARINT
    if field.type == _F.TYPE_MESSAGE:
        assert field.message_type is not None
        inner = st.just(b"") if depth == 0 else messages(field.message_type, words, depth - 1)
        return inner.map(_with_length), _BYTES
    if field.type in (_F.TYPE_STRING, _F.TYPE_BYTES):
        return _strings(field, words).map(_with_length), _BYTES
    raise NotImplementedError(f"{field.full_name}: no strategy for fields of type {field.type}")


def _with_length(payload: bytes) -> bytes:
    return varint(len(payload)) + payload


def _integers(field: FieldDescriptor, words: Words) -> st.SearchStrategy[bytes]:
    bits = _INTEGERS[field.type]
    bounds = (2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1, 2**bits, -1, 2**16, 1000)
    good = [word for word in words.get(field.name, ()) if isinstance(word, int)]
    numbers = [_SMALL, _SMALL, st.sampled_from(bounds)]
    if good:
        numbers += [st.sampled_from(good)] * 2
    return st.one_of(numbers).map(varint)


def _strings(field: FieldDescriptor, words: Words) -> st.SearchStrategy[bytes]:
    good = [word for word in words.get(field.name, ()) if isinstance(word, bytes)]
    if field.name in ONLY_WORDS:
        return st.sampled_from(good or [b""])
    if field.type == _F.TYPE_STRING:
        odd = st.sampled_from(_TEXTS) | st.text(max_size=6).map(
            lambda text: text.encode("utf-8", "surrogatepass")
        )
    else:
        ids = st.lists(st.integers(-2, 300), max_size=8).map(
            lambda numbers: struct.pack(f"<{len(numbers)}i", *numbers)
        )
        sized = st.builds(
            lambda byte, size: byte * size,
            st.sampled_from((b"\0", b"\7", b"\xff")),
            st.sampled_from(_SIZES),
        )
        odd = ids | sized | st.binary(max_size=20)
    return st.one_of([odd, *[st.sampled_from(good)] * 3] if good else [odd])
