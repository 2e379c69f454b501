"""What makes states of the hand-over explorer alike: neither the buffers of a ring nor the two
hand-overs have names of their own.

What can happen next treats all buffers of a ring the same, and both hand-overs: every free buffer
is offered, and nothing looks at a number other than to tell one buffer from another. So exchanging
names in a state exchanges them in all that comes of it and changes nothing else, and of the states
that differ in names alone, one has to be explored.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

from tests.core.handover_parts import Local
from tests.core.handover_rings import Buffer, Rings


class Names(NamedTuple):
    """What each buffer is called now, by what it was called."""

    sender: tuple[int, ...]
    receiver: tuple[int, ...]


def renamings(num_buffers: int) -> Iterator[Names]:
    """All of them, beginning with the one that changes nothing."""
    for sender, receiver in product(permutations(range(num_buffers)), repeat=2):
        yield Names(sender, receiver)


def renamed(local: Local, names: Names) -> Local:
    sender, receiver = names

    def of(source: int | None) -> int | None:
        return None if source is None else sender[source]

    packing = local.packing
    return local._replace(
        to_receiver=tuple(
            (*each[:2], of(each[2])) if each[0] == "kv_chunk" else each
            for each in local.to_receiver
        ),
        packing=None if packing is None else (packing[0], sender[packing[1]]),
        sent=tuple((index, sender[buffer]) for index, buffer in local.sent),
        credited=tuple(receiver[buffer] for buffer in local.credited),
        landing=tuple(
            each._replace(buffer=receiver[each.buffer], source=of(each.source))
            for each in local.landing
        ),
    )


def renamed_rings(rings: Rings, names: Names) -> Rings:
    return Rings(_moved(rings.sender, names.sender), _moved(rings.receiver, names.receiver))


def mirrored(rings: Rings) -> Rings:
    """With the two hand-overs' parts exchanged."""
    return Rings(
        tuple(_of_other(buffer) for buffer in rings.sender),
        tuple(_of_other(buffer) for buffer in rings.receiver),
    )


def _moved(buffers: tuple[Buffer, ...], names: tuple[int, ...]) -> tuple[Buffer, ...]:
    return tuple(buffers[names.index(place)] for place in range(len(buffers)))


def _of_other(buffer: Buffer) -> Buffer:
    return buffer if buffer.owner < 0 else buffer._replace(owner=1 - buffer.owner)
