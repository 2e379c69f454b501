"""Strategies for what one call sends: valid messages that were changed, or made from nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tests.fuzz.messages import Words, messages
from tests.fuzz.mutations import Damage, damages
from tests.fuzz.rpcs import Rpc

Stream = tuple[bytes, ...]

_LOOPBACK = b"127.0.0.1"


def streams(rpc: Rpc, seeds: Sequence[Sequence[bytes]], words: Words) -> st.SearchStrategy[Stream]:
    """What one call of the RPC sends. seeds: valid calls."""
    made = messages(rpc.request, words)
    valid = st.sampled_from([tuple(seed) for seed in seeds])
    byte_damage = damages().map(_unless_addressed)
    change: st.SearchStrategy[Damage] = st.one_of(
        made.map(_overwritten_by),
        made.map(_overwritten_by),
        st.floats(0, 1, exclude_max=True).map(lambda share: _without(rpc.request, share)),
        byte_damage,
        made.map(_replaced_by),
        st.builds(lambda other, damage: _replaced_by(damage(other)), made, byte_damage),
    )
    place = st.floats(0, 1, exclude_max=True)
    changed = st.builds(_changed, valid, st.lists(st.tuples(place, change), min_size=1, max_size=3))
    odd = st.sampled_from(((), (b"",), (b"", b""), (b"\xff" * 40,)))
    if not rpc.sends_many:
        return st.one_of(changed, changed, changed, changed, odd)
    mixed = st.builds(_mixed, valid, st.lists(place, max_size=6))
    fresh = st.lists(made, max_size=4).map(tuple)
    return st.one_of(changed, changed, changed, mixed, fresh, odd)


def _changed(stream: Stream, changes: Sequence[tuple[float, Damage]]) -> Stream:
    out = list(stream)
    for place, change in changes:
        at = int(place * len(out))
        out[at] = change(out[at])
    return tuple(out)


def _mixed(stream: Stream, places: Sequence[float]) -> Stream:
    """The same messages in another order, some of them twice, some never."""
    return tuple(stream[int(place * len(stream))] for place in places)


def _unless_addressed(damage: Damage) -> Damage:
    """A worker connects to where it is told: a damaged address could be somebody else's."""
    return lambda message: message if _LOOPBACK in message else damage(message)


def _overwritten_by(extra: bytes) -> Damage:
    return lambda message: message + extra


def _replaced_by(other: bytes) -> Damage:
    return lambda _: other


def _without(kind: Descriptor, share: float) -> Damage:
    """Clears one of the fields that are set, at any depth."""

    def clear(data: bytes) -> bytes:
        try:
            message = GetMessageClass(kind).FromString(data)
        except DecodeError:
            return data
        if places := list(_set_fields(message)):
            owner, name = places[int(share * len(places))]
            owner.ClearField(name)
        return message.SerializeToString()

    return clear


def _set_fields(message: Message) -> Iterator[tuple[Message, str]]:
    for field, value in message.ListFields():
        yield message, field.name
        # A map is cleared as a whole: walking it gives keys.
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                yield from _set_fields(part)
