"""Damage to bytes that were well formed, as a transport or an attacker does it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

LONG = b"\xff" * 11
"""A varint that has no end within the ten bytes that one may have."""

Damage = Callable[[bytes], bytes]


def damages() -> st.SearchStrategy[Damage]:
    """One to four ways of damaging, one after the other. Places are shares of the length, so that
    they fit whatever is to be damaged."""
    share = st.floats(0, 1, exclude_max=True)
    one = st.one_of(
        st.builds(_flip, share, st.integers(1, 255)),
        st.builds(_cut, share),
        st.builds(_drop, share, st.integers(1, 8)),
        st.builds(_insert, share, st.sampled_from((LONG, b"\0", b"\x7f", b"\xff\xff\xff\xff\x0f"))),
        st.builds(_insert, share, st.binary(min_size=1, max_size=6)),
        st.builds(_repeat, share, st.integers(1, 24), st.sampled_from((1, 2, 400))),
        st.builds(_splice, share, share),
    )
    return st.lists(one, min_size=1, max_size=4).map(_all)


def _all(steps: list[Damage]) -> Damage:
    def damage(data: bytes) -> bytes:
        for step in steps:
            data = step(data)
        return data

    return damage


def _flip(share: float, mask: int) -> Damage:
    def damage(data: bytes) -> bytes:
        if not data:
            return bytes([mask])
        at = int(share * len(data))
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]

    return damage


def _cut(share: float) -> Damage:
    return lambda data: data[: int(share * len(data))]


def _drop(share: float, count: int) -> Damage:
    return lambda data: data[: int(share * len(data))] + data[int(share * len(data)) + count :]


def _insert(share: float, extra: bytes) -> Damage:
    return lambda data: data[: int(share * len(data))] + extra + data[int(share * len(data)) :]


def _repeat(share: float, size: int, times: int) -> Damage:
    def damage(data: bytes) -> bytes:
        at = int(share * len(data))
        return data[:at] + data[at : at + size] * times + data[at:]

    return damage


def _splice(first: float, second: float) -> Damage:
    """Its own head followed by its own tail, of another place."""
    return lambda data: data[: int(first * len(data))] + data[int(second * len(data)) :]
