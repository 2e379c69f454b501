"""Everything that can happen next to one hand-over of the explorer, faults and deadlines too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from baton.core.errors import HandoverFailed
from baton.core.handover import CollectorState, GiverSide
from baton.core.handover import HandoverEvent as Event
from tests.core.handover_local import Handover
from tests.core.handover_parts import (
    Broken,
    Landing,
    Life,
    Local,
    Move,
    Mutation,
    Phase,
    thawed,
)


def moves(
    local: Local, num_slots: int, mutation: Mutation | None, *, faults: bool
) -> Iterator[Move]:
    """Everything that can happen next to one hand-over, short of its workers' deaths: what is a
    fault, or what is none. Of the slots of a ring, any may be taken that is free."""
    now = Handover(local, mutation)
    for _, step, fault in (*_giver_moves(now, num_slots), *_collector_moves(now, num_slots)):
        if fault is not faults:
            continue
        handover = Handover(local, mutation)
        try:
            step(handover)
        except HandoverFailed as error:
            raise Broken(f"a side accuses its peer: {error.message}") from None
        yield Move(handover.frozen(), tuple(handover.uses))


Step = tuple[str, Callable[[Handover], None], bool]


def _giver_moves(now: Handover, num_slots: int) -> Iterator[Step]:
    if now.giver_life is not Life.ALIVE:
        return
    if now.packing is not None:
        yield "packed", Handover.packed, False
    if now.giver.ended:
        return
    if now.computed < now.giver.num_positions:
        yield "compute", Handover.compute, False
    if now.to_giver:
        yield "giver hears", Handover.giver_hears, False
    elif not now.unbroken or now.collector.ended or now.collector_life is not Life.ALIVE:
        yield "giver loses peer", lambda h: h.end_giver(Event.PEER_LOST), False
    if now.packing is None and _may_pack(now):
        for slot in range(num_slots):
            yield "pack", partial(Handover.pack, slot=slot), False
    yield "giver cancels", lambda h: h.end_giver(Event.CANCEL, tell=True), True


def _may_pack(now: Handover) -> bool:
    return GiverSide(*thawed(now.local.giver)).next_run() is not None


def _collector_moves(now: Handover, num_slots: int) -> Iterator[Step]:
    if now.collector_life is not Life.ALIVE:
        return
    for landing in now.landing.values():
        yield from _landing_moves(now, landing)
    if now.collector.ended:
        return
    if now.to_collector:
        yield "collector hears", Handover.collector_hears, False
    elif not now.unbroken or now.giver.ended or now.giver_life is not Life.ALIVE:
        yield "collector loses peer", lambda h: h.end_collector(Event.PEER_LOST), False
    if now.collector.state is CollectorState.RESERVING:
        yield "grant", lambda h: h.grant(0), False
        yield "grant behind a cached prefix", lambda h: h.grant(1), False
        yield "pool full", Handover.refuse, True
    if now.collector.wants_credit:
        if now.mutation is Mutation.CREDIT_WITHOUT_SLOT and not now.credited:
            yield "credit", Handover.credit_without_slot, False
        for slot in range(num_slots):
            yield "credit", partial(Handover.credit, slot=slot), False
    yield "collector cancels", lambda h: h.end_collector(Event.CANCEL, tell=True), True
    if now.unbroken:
        yield "stream breaks", Handover.disconnect, True


def _landing_moves(now: Handover, landing: Landing) -> Iterator[Step]:
    index = landing.run.index
    if landing.phase is Phase.UNPACK:
        yield "unpack", lambda h: h.unpack(index), False
    elif now.giver_life is Life.DEAD:
        yield "read fails", lambda h: h.fail_read(index), False
    elif landing.phase is Phase.STUCK or now.giver_life is Life.FROZEN:
        yield "read is late", lambda h: h.end_collector(Event.CANCEL, tell=True), False
    else:
        yield "read", lambda h: h.read(index), False
        yield "read sticks", lambda h: h.stick(index), True


def expire(local: Local, mutation: Mutation | None) -> Iterator[Move]:
    """The deadlines of what has not ended."""
    now = Handover(local, mutation)
    sides: list[tuple[bool, Callable[[Handover], None]]] = [
        (
            now.giver.ended or now.giver_life is not Life.ALIVE,
            lambda h: h.end_giver(Event.DEADLINE, tell=True),
        ),
        (
            now.collector.ended or now.collector_life is not Life.ALIVE,
            lambda h: h.end_collector(Event.DEADLINE, tell=True),
        ),
    ]
    for over, end in sides:
        if not over:
            handover = Handover(local, mutation)
            end(handover)
            yield Move(handover.frozen(), tuple(handover.uses))


def overwritten(local: Local, slot: int, mutation: Mutation | None) -> Local:
    """When a slot of the giver's is taken, by either hand-over."""
    handover = Handover(local, mutation)
    handover.overwritten(slot)
    return handover.frozen()


def fate(local: Local, name: str) -> Local:
    """What becomes of a hand-over when one of its workers does."""
    handover = Handover(local, None)
    match name:
        case "giver dies":
            handover.lose_giver()
        case "collector dies":
            handover.lose_collector()
        case "giver freezes":
            handover.giver_life = Life.FROZEN
        case "collector freezes":
            handover.collector_life = Life.FROZEN
        case "giver thaws":
            handover.giver_life = Life.ALIVE
        case "collector thaws":
            handover.collector_life = Life.ALIVE
    return handover.frozen()
