"""The two rings that the explorer's hand-overs share: whose a slot is, what is in it, who writes.

Their slots follow production's own table. A violation raises Broken.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.core.slot_states import SlotEvent, SlotState, follow
from tests.core.handover_parts import Broken, Local, Offers, SlotUse

SLOTS = 2


class GiverSlot(NamedTuple):
    """content: (hand-over, parcel) sealed in it, or None."""

    state: SlotState = SlotState.FREE
    owner: int = -1
    content: tuple[int, int] | None = None


class LandingSlot(NamedTuple):
    """written: a transfer may still write into it."""

    state: SlotState = SlotState.FREE
    owner: int = -1
    written: bool = False


class Rings(NamedTuple):
    giver: tuple[GiverSlot, ...] = (GiverSlot(),) * SLOTS
    collector: tuple[LandingSlot, ...] = (LandingSlot(),) * SLOTS


def offers(rings: Rings, owner: int, local: Local, *, troubled: bool) -> Offers:
    """What a hand-over finds."""
    return Offers(
        _free(rings.giver),
        _free(rings.collector),
        tuple(
            rings.giver[each.source].content == (owner, each.run.index) for each in local.landing
        ),
        troubled,
    )


def used(rings: Rings, owner: int, uses: tuple[SlotUse, ...]) -> Rings:
    """The rings after what one hand-over did to them."""
    giver, collector = list(rings.giver), list(rings.collector)
    for ring, slot, event, parcel in uses:
        state, holder = giver[slot][:2] if ring == "giver" else collector[slot][:2]
        if event is not SlotEvent.TAKE and holder != owner:
            raise Broken("a slot was touched that belongs to another hand-over")
        if event is None:
            content = None if parcel is None else (owner, parcel)
            giver[slot] = giver[slot]._replace(content=content)
            continue
        try:
            state = follow(state, event)
        except RuntimeError as error:
            raise Broken(str(error)) from None
        holder = -1 if state is SlotState.FREE else owner
        if ring == "giver":
            giver[slot] = giver[slot]._replace(state=state, owner=holder)
            continue
        ended = event is SlotEvent.SETTLE and parcel is None
        written = event is SlotEvent.LEND or (collector[slot].written and not ended)
        if written and state in (SlotState.FREE, SlotState.HELD):
            raise Broken("a slot is free that a transfer may still write into")
        collector[slot] = LandingSlot(state, holder, written)
    return Rings(tuple(giver), tuple(collector))


def without(rings: Rings, name: str) -> Rings:
    """The memory of a process that dies is gone with it."""
    match name:
        case "giver dies":
            return rings._replace(giver=Rings().giver)
        case "collector dies":
            return rings._replace(collector=Rings().collector)
    return rings


def later(rings: Rings) -> list[Rings]:
    """Each transfer in limbo may end, some time."""
    return [
        used(rings, each.owner, (SlotUse("collector", slot, SlotEvent.SETTLE),))
        for slot, each in enumerate(rings.collector)
        if each.state is SlotState.LIMBO
    ]


def mirrored(rings: Rings) -> Rings:
    """With the two hand-overs' parts exchanged."""

    def other(owner: int) -> int:
        return owner if owner < 0 else 1 - owner

    giver = tuple(
        slot._replace(
            owner=other(slot.owner),
            content=None if slot.content is None else (1 - slot.content[0], slot.content[1]),
        )
        for slot in rings.giver
    )
    landing = tuple(slot._replace(owner=other(slot.owner)) for slot in rings.collector)
    return Rings(giver, landing)


def _free(slots: tuple[GiverSlot, ...] | tuple[LandingSlot, ...]) -> int:
    return next((i for i, slot in enumerate(slots) if slot[0] is SlotState.FREE), -1)
