"""What makes states of the hand-over explorer alike: neither the slots of a ring nor the two
hand-overs have names of their own.

What can happen next treats all slots of a ring the same, and both hand-overs: every free slot is
offered, and nothing looks at a number other than to tell one slot from another. So exchanging
names in a state exchanges them in all that comes of it and changes nothing else, and of the states
that differ in names alone, one has to be explored.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

from tests.core.handover_parts import Local
from tests.core.handover_rings import Rings, Slot


class Names(NamedTuple):
    """What each slot is called now, by what it was called."""

    giver: tuple[int, ...]
    collector: tuple[int, ...]


def renamings(num_slots: int) -> Iterator[Names]:
    """All of them, beginning with the one that changes nothing."""
    for giver, collector in product(permutations(range(num_slots)), repeat=2):
        yield Names(giver, collector)


def renamed(local: Local, names: Names) -> Local:
    giver, collector = names

    def of(source: int | None) -> int | None:
        return None if source is None else giver[source]

    packing = local.packing
    return local._replace(
        to_collector=tuple(
            (*each[:2], of(each[2])) if each[0] == "parcel" else each for each in local.to_collector
        ),
        packing=None if packing is None else (packing[0], giver[packing[1]]),
        sent=tuple((index, giver[slot]) for index, slot in local.sent),
        credited=tuple(collector[slot] for slot in local.credited),
        landing=tuple(
            each._replace(slot=collector[each.slot], source=of(each.source))
            for each in local.landing
        ),
    )


def renamed_rings(rings: Rings, names: Names) -> Rings:
    return Rings(_moved(rings.giver, names.giver), _moved(rings.collector, names.collector))


def mirrored(rings: Rings) -> Rings:
    """With the two hand-overs' parts exchanged."""
    return Rings(
        tuple(_of_other(slot) for slot in rings.giver),
        tuple(_of_other(slot) for slot in rings.collector),
    )


def _moved(slots: tuple[Slot, ...], names: tuple[int, ...]) -> tuple[Slot, ...]:
    return tuple(slots[names.index(place)] for place in range(len(slots)))


def _of_other(slot: Slot) -> Slot:
    return slot if slot.owner < 0 else slot._replace(owner=1 - slot.owner)
