"""The two rings that the explorer's hand-overs share: whose a slot is, and who may write into it.

Their slots follow production's own table. A violation raises Broken.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.core.slot_states import SlotEvent, SlotState, follow
from tests.core.handover_parts import Broken, SlotUse


class Slot(NamedTuple):
    """owner: the hand-over that holds it, or -1. written: a transfer may still write into it."""

    state: SlotState = SlotState.FREE
    owner: int = -1
    written: bool = False


class Rings(NamedTuple):
    giver: tuple[Slot, ...]
    collector: tuple[Slot, ...]


def fresh(num_slots: int) -> Rings:
    return Rings((Slot(),) * num_slots, (Slot(),) * num_slots)


def used(rings: Rings, owner: int, uses: tuple[SlotUse, ...]) -> Rings | None:
    """The rings after what one hand-over does to them, or None when it finds no free slot where
    it would take one."""
    slots = {"giver": list(rings.giver), "collector": list(rings.collector)}
    for ring, slot, event, pretended in uses:
        state, holder, written = slots[ring][slot]
        if event is SlotEvent.TAKE and state is not SlotState.FREE:
            return None
        if event is not SlotEvent.TAKE and holder != owner:
            raise Broken("a slot was touched that belongs to another hand-over")
        if event is None:
            continue
        try:
            state = follow(state, event)
        except RuntimeError as error:
            raise Broken(str(error)) from None
        if event is SlotEvent.SETTLE and not pretended:
            written = False
        written = written or event is SlotEvent.LEND
        if written and state in (SlotState.FREE, SlotState.HELD):
            raise Broken("a slot is free that a transfer may still write into")
        # Whoever held it has left a slot in limbo.
        holder = -1 if state in (SlotState.FREE, SlotState.LIMBO) else owner
        slots[ring][slot] = Slot(state, holder, written)
    return Rings(tuple(slots["giver"]), tuple(slots["collector"]))


def without(rings: Rings, name: str) -> Rings:
    """The memory of a process that dies is gone with it."""
    match name:
        case "giver dies":
            return rings._replace(giver=fresh(len(rings.giver)).giver)
        case "collector dies":
            return rings._replace(collector=fresh(len(rings.collector)).collector)
    return rings


def settled(rings: Rings, slot: int) -> Rings:
    """After the end of the transfer that this slot is in limbo for, if it is."""
    if rings.collector[slot].state is not SlotState.LIMBO:
        return rings
    after = used(rings, -1, (SlotUse("collector", slot, SlotEvent.SETTLE),))
    assert after is not None
    return after


def in_limbo(rings: Rings) -> bool:
    return any(slot.state is SlotState.LIMBO for slot in rings.collector)


def check_leaks(rings: Rings, *, giver: bool, collector: bool) -> None:
    """Of the rings of live processes, when nothing can happen any more. Raises Broken."""
    if giver and any(slot.state is not SlotState.FREE for slot in rings.giver):
        raise Broken("a slot of the giver has leaked")
    over = SlotState.FREE, SlotState.LIMBO
    if collector and any(slot.state not in over for slot in rings.collector):
        raise Broken("a slot of the collector has leaked")
