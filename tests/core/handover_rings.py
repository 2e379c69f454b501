"""The two rings that the explorer's hand-overs share: whose a buffer is, and who may write into it.

Their buffers follow production's own table. A violation raises Broken.
"""

from __future__ import annotations

from typing import NamedTuple

from batonlm.core.handover.table import BufferEvent, BufferState, follow_buffer
from tests.core.handover_parts import Broken, BufferUse


class Buffer(NamedTuple):
    """owner: the hand-over that holds it, or -1. written: a transfer may still write into it."""

    state: BufferState = BufferState.FREE
    owner: int = -1
    written: bool = False


class Rings(NamedTuple):
    sender: tuple[Buffer, ...]
    receiver: tuple[Buffer, ...]


def fresh(num_buffers: int) -> Rings:
    return Rings((Buffer(),) * num_buffers, (Buffer(),) * num_buffers)


def used(rings: Rings, owner: int, uses: tuple[BufferUse, ...]) -> Rings | None:
    """The rings after what one hand-over does to them, or None when it finds no free buffer where
    it would take one."""
    buffers = {"sender": list(rings.sender), "receiver": list(rings.receiver)}
    for ring, buffer, event, pretended in uses:
        state, holder, written = buffers[ring][buffer]
        if event is BufferEvent.TAKE and state is not BufferState.FREE:
            return None
        if event is not BufferEvent.TAKE and holder != owner:
            raise Broken("a buffer was touched that belongs to another hand-over")
        if event is None:
            continue
        try:
            state = follow_buffer(state, event)
        except RuntimeError as error:
            raise Broken(str(error)) from None
        if event is BufferEvent.SETTLE and not pretended:
            written = False
        written = written or event is BufferEvent.LEND
        if written and state in (BufferState.FREE, BufferState.HELD):
            raise Broken("a buffer is free that a transfer may still write into")
        # Whoever held it has left a buffer orphaned.
        holder = -1 if state in (BufferState.FREE, BufferState.ORPHANED) else owner
        buffers[ring][buffer] = Buffer(state, holder, written)
    return Rings(tuple(buffers["sender"]), tuple(buffers["receiver"]))


def without(rings: Rings, name: str) -> Rings:
    """The memory of a process that dies is gone with it."""
    match name:
        case "sender dies":
            return rings._replace(sender=fresh(len(rings.sender)).sender)
        case "receiver dies":
            return rings._replace(receiver=fresh(len(rings.receiver)).receiver)
    return rings


def settled(rings: Rings, buffer: int) -> Rings:
    """After the end of the transfer that this buffer is orphaned for, if it is."""
    if rings.receiver[buffer].state is not BufferState.ORPHANED:
        return rings
    after = used(rings, -1, (BufferUse("receiver", buffer, BufferEvent.SETTLE),))
    assert after is not None
    return after


def orphaned(rings: Rings) -> bool:
    return any(buffer.state is BufferState.ORPHANED for buffer in rings.receiver)


def check_leaks(rings: Rings, *, sender: bool, receiver: bool) -> None:
    """Of the rings of live processes, when nothing can happen any more. Raises Broken."""
    if sender and any(buffer.state is not BufferState.FREE for buffer in rings.sender):
        raise Broken("a buffer of the sender has leaked")
    over = BufferState.FREE, BufferState.ORPHANED
    if receiver and any(buffer.state not in over for buffer in rings.receiver):
        raise Broken("a buffer of the receiver has leaked")
