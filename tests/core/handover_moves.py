"""Everything that can happen next to one hand-over of the explorer, faults and deadlines too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from batonlm.core.errors import HandoverFailed
from batonlm.core.handover.table import HandoverEvent as Event
from batonlm.core.handover.table import ReceiverState, SenderSide, SenderState
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
    local: Local, num_buffers: int, mutation: Mutation | None, *, faults: bool
) -> Iterator[Move]:
    """Everything that can happen next to one hand-over, short of its workers' deaths: what is a
    fault, or what is none. Of the buffers of a ring, any may be taken that is free."""
    now = Handover(local, mutation)
    for _, step, fault in (*_sender_moves(now, num_buffers), *_receiver_moves(now, num_buffers)):
        if fault is not faults:
            continue
        handover = Handover(local, mutation)
        try:
            step(handover)
        except HandoverFailed as error:
            raise Broken(f"a side accuses its peer: {error.message}") from None
        yield Move(handover.frozen(), tuple(handover.uses))


Step = tuple[str, Callable[[Handover], None], bool]


def _sender_moves(now: Handover, num_buffers: int) -> Iterator[Step]:
    if now.sender_life is not Life.ALIVE:
        return
    if now.packing is not None:
        yield "packed", Handover.packed, False
    if now.sender.ended:
        return
    if now.sender.is_prefix:
        yield from _cache_moves(now)
    elif now.computed < now.sender.num_positions:
        yield "compute", Handover.compute, False
    if now.to_sender:
        yield "sender hears", Handover.sender_hears, False
    elif not now.unbroken or now.receiver.ended or now.receiver_life is not Life.ALIVE:
        yield "sender loses peer", lambda h: h.end_sender(Event.PEER_LOST), False
    if now.packing is None and _may_pack(now):
        for buffer in range(num_buffers):
            yield "pack", partial(Handover.pack, buffer=buffer), False
    yield "sender cancels", lambda h: h.end_sender(Event.CANCEL, tell=True), True


def _cache_moves(now: Handover) -> Iterator[Step]:
    if now.sender.state is SenderState.OPENED and now.computed < 0:
        for found in range(now.sender.num_positions + 1):
            yield "pin", partial(Handover.pin, num_positions=found), False
    if now.mutation is Mutation.EVICT_WHILE_OFFERED and now.computed > 0:
        yield "evict", Handover.evict, False


def _may_pack(now: Handover) -> bool:
    return SenderSide(*thawed(now.local.sender)).next_chunk() is not None


def _receiver_moves(now: Handover, num_buffers: int) -> Iterator[Step]:
    if now.receiver_life is not Life.ALIVE:
        return
    for landing in now.landing.values():
        yield from _landing_moves(now, landing)
    if now.receiver.ended:
        return
    if now.to_receiver:
        yield "receiver hears", Handover.receiver_hears, False
    elif not now.unbroken or now.sender.ended or now.sender_life is not Life.ALIVE:
        yield "receiver loses peer", lambda h: h.end_receiver(Event.PEER_LOST), False
    if now.receiver.state is ReceiverState.RESERVING:
        yield "grant", lambda h: h.grant(0), False
        yield "grant behind a cached prefix", lambda h: h.grant(1), False
        yield "pool full", Handover.refuse, True
    if now.receiver.wants_credit:
        if now.mutation is Mutation.CREDIT_WITHOUT_BUFFER and not now.credited:
            yield "credit", Handover.credit_without_buffer, False
        for buffer in range(num_buffers):
            yield "credit", partial(Handover.credit, buffer=buffer), False
    yield "receiver cancels", lambda h: h.end_receiver(Event.CANCEL, tell=True), True
    if now.unbroken:
        yield "stream breaks", Handover.disconnect, True


def _landing_moves(now: Handover, landing: Landing) -> Iterator[Step]:
    index = landing.run.index
    if landing.phase is Phase.UNPACK:
        if now.may_unpack(landing):
            yield "unpack", lambda h: h.unpack(index), False
    elif now.sender_life is Life.DEAD:
        yield "read fails", lambda h: h.fail_read(index), False
    elif landing.phase is Phase.STUCK or now.sender_life is Life.FROZEN:
        yield "read is late", lambda h: h.end_receiver(Event.CANCEL, tell=True), False
    else:
        yield "read", lambda h: h.read(index), False
        yield "read sticks", lambda h: h.stick(index), True


def expire(local: Local, mutation: Mutation | None) -> Iterator[Move]:
    """The deadlines of what has not ended."""
    now = Handover(local, mutation)
    sides: list[tuple[bool, Callable[[Handover], None]]] = [
        (
            now.sender.ended or now.sender_life is not Life.ALIVE,
            lambda h: h.end_sender(Event.DEADLINE, tell=True),
        ),
        (
            now.receiver.ended or now.receiver_life is not Life.ALIVE,
            lambda h: h.end_receiver(Event.DEADLINE, tell=True),
        ),
    ]
    for over, end in sides:
        if not over:
            handover = Handover(local, mutation)
            end(handover)
            yield Move(handover.frozen(), tuple(handover.uses))


def overwritten(local: Local, buffer: int, mutation: Mutation | None) -> Local:
    """When a buffer of the sender's is taken, by either hand-over."""
    handover = Handover(local, mutation)
    handover.overwritten(buffer)
    return handover.frozen()


def filter_reason(local: Local, name: str) -> Local:
    """What becomes of a hand-over when one of its workers does."""
    handover = Handover(local, None)
    match name:
        case "sender dies":
            handover.lose_sender()
        case "receiver dies":
            handover.lose_receiver()
        case "sender freezes":
            handover.sender_life = Life.FROZEN
        case "receiver freezes":
            handover.receiver_life = Life.FROZEN
        case "sender thaws":
            handover.sender_life = Life.ALIVE
        case "receiver thaws":
            handover.receiver_life = Life.ALIVE
    return handover.frozen()
