"""Everything that can happen next to one hand-over of the explorer, faults and deadlines too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.core.errors import HandoverFailed
from baton.core.handover import CollectorState
from baton.core.handover import HandoverEvent as Event
from tests.core.handover_local import Handover
from tests.core.handover_parts import (
    POSITIONS,
    Broken,
    Landing,
    Life,
    Local,
    Move,
    Mutation,
    Offers,
    Phase,
)


def moves(local: Local, offers: Offers, mutation: Mutation | None) -> Iterator[Move]:
    """Everything that can happen next to one hand-over, short of its workers' deaths."""
    names = Handover(local, mutation)
    for name, step, fault in (*_giver_moves(names, offers), *_collector_moves(names, offers)):
        handover = Handover(local, mutation)
        try:
            step(handover)
        except HandoverFailed as error:
            raise Broken(f"a side accuses its peer: {error.message}") from None
        yield Move(name, handover.frozen(), tuple(handover.uses), fault)


Step = tuple[str, Callable[[Handover], None], bool]


def _giver_moves(now: Handover, offers: Offers) -> Iterator[Step]:
    if now.giver_life is not Life.ALIVE:
        return
    if now.packing is not None:
        yield "packed", Handover.packed, False
    if now.giver.ended:
        return
    if now.computed < POSITIONS:
        yield "compute", Handover.compute, False
    if now.to_giver:
        yield "giver hears", Handover.giver_hears, False
    elif not now.unbroken or now.collector.ended or now.collector_life is not Life.ALIVE:
        yield "giver loses peer", lambda h: h.end_giver(Event.PEER_LOST), False
    if now.packing is None and offers.giver_slot >= 0 and _may_pack(now):
        yield "pack", lambda h: h.pack(offers.giver_slot), False
    yield "giver cancels", lambda h: h.end_giver(Event.CANCEL, tell=True), True


def _may_pack(now: Handover) -> bool:
    return Handover(now.local, None).giver.next_run() is not None


def _collector_moves(now: Handover, offers: Offers) -> Iterator[Step]:
    if now.collector_life is not Life.ALIVE:
        return
    for fresh, landing in zip(offers.fresh, now.landing.values(), strict=True):
        yield from _landing_moves(now, landing, fresh=fresh, troubled=offers.troubled)
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
        elif offers.landing_slot >= 0:
            yield "credit", lambda h: h.credit(offers.landing_slot), False
    yield "collector cancels", lambda h: h.end_collector(Event.CANCEL, tell=True), True
    if now.unbroken:
        yield "stream breaks", Handover.disconnect, True


def _landing_moves(
    now: Handover, landing: Landing, *, fresh: bool, troubled: bool
) -> Iterator[Step]:
    index = landing.run.index
    if landing.phase is Phase.UNPACK:
        yield "unpack", lambda h: h.unpack(index), False
    elif now.giver_life is Life.DEAD:
        yield "read fails", lambda h: h.fail_read(index), False
    elif landing.phase is Phase.STUCK or now.giver_life is Life.FROZEN:
        yield "read is late", lambda h: h.end_collector(Event.CANCEL, tell=True), False
    else:
        yield "read", lambda h: h.read(index, fresh=fresh, troubled=troubled), False
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
            yield Move("deadline", handover.frozen(), tuple(handover.uses), False)


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
