"""The values of the hand-over explorer: states, moves, faults and what must hold of a hand-over."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple

from batonlm.core.handover.table import (
    BufferEvent,
    KvChunkRange,
    ReceiverSide,
    ReceiverState,
    SenderSide,
    SenderState,
    State,
)

PER_KV_CHUNK = 1

Message = tuple[Any, ...]


class Mutation(Enum):
    """A seeded fault of the protocol, which the explorer must find."""

    FORGET_TO_CONFIRM = auto()
    FREE_WHEN_SENT = auto()
    ACCEPT_UNVERIFIED = auto()
    FREE_WHILE_LENT = auto()
    CREDIT_WITHOUT_BUFFER = auto()
    FREE_WHILE_PACKING = auto()
    KEEP_BUFFERS_AT_THE_END = auto()
    CONFIRM_BEFORE_UNPACKING = auto()
    FINISH_EARLY = auto()
    EVICT_WHILE_OFFERED = auto()
    UNPACK_OUT_OF_ORDER = auto()


class Life(Enum):
    """Of a process: a frozen one does nothing and is not noticed by its reads."""

    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class Phase(Enum):
    """Of a KV chunk at the receiver. STUCK: its read does not end in time, if ever."""

    READ = auto()
    STUCK = auto()
    UNPACK = auto()


class Landing(NamedTuple):
    """source: the sender's buffer, or None once that holds something else or does not matter."""

    run: KvChunkRange
    buffer: int
    source: int | None
    phase: Phase


class BufferUse(NamedTuple):
    """ring: "sender" or "receiver". event: None when its holder writes to it. pretended: its holder
    takes it to be so, and it is not."""

    ring: str
    buffer: int
    event: BufferEvent | None
    pretended: bool = False


class Local(NamedTuple):
    """Everything about one hand-over. sender, receiver: the fields of its sides. computed:
    positions, -1 before its first chunk is planned, or a prefix is pinned. sent: (kv_chunk, buffer)
    until confirmed. unpacked: positions, in order. held: whether the receiver owns blocks for it.
    """

    sender: tuple[Any, ...]
    receiver: tuple[Any, ...]
    to_sender: tuple[Message, ...] = (("open",),)
    to_receiver: tuple[Message, ...] = ()
    unbroken: bool = True
    computed: int = -1
    packing: tuple[KvChunkRange, int] | None = None
    sent: tuple[tuple[int, int], ...] = ()
    credited: tuple[int, ...] = ()
    landing: tuple[Landing, ...] = ()
    unpacked: tuple[int, ...] = ()
    cached: int = 0
    held: bool = False
    sender_life: Life = Life.ALIVE
    receiver_life: Life = Life.ALIVE


class Move(NamedTuple):
    """What can happen next, if the buffers that it takes are free."""

    after: Local
    uses: tuple[BufferUse, ...]


class Broken(AssertionError):
    """A promise does not hold."""


def begin(num_positions: int, state_positions: int, *, is_prefix: bool) -> Local:
    sender = SenderSide(num_positions, is_prefix=is_prefix, state_positions=state_positions)
    receiver = ReceiverSide(
        num_positions, PER_KV_CHUNK, is_prefix=is_prefix, state_positions=state_positions
    )
    return Local(of_side(sender), of_side(receiver))


_FIELDS = {side: attrgetter(*(f.name for f in fields(side))) for side in (SenderSide, ReceiverSide)}


def of_side(side: SenderSide | ReceiverSide) -> tuple[Any, ...]:
    return tuple([frozenset(v) if type(v) is set else v for v in _FIELDS[type(side)](side)])


def thawed(side: tuple[Any, ...]) -> list[Any]:
    return [set(value) if type(value) is frozenset else value for value in side]


def check(local: Local, sender: State, receiver: State) -> None:
    """What holds of one hand-over, whose sides are in these states, at every moment.

    Raises Broken.
    """
    unpacked, computed, cached = local.unpacked, local.computed, local.cached
    num_positions = local.sender[0]
    end = num_positions + local.sender[-1]
    if unpacked:
        if len(set(unpacked)) != len(unpacked):
            raise Broken("a position was unpacked twice")
        # A state is that of whatever was computed last.
        there = end if computed == num_positions else computed
        if unpacked[0] < cached or unpacked[-1] >= there:
            raise Broken("a position was unpacked that was not computed, or was there already")
        is_prefix = local.sender[-2]
        if is_prefix and unpacked != tuple(range(cached, cached + len(unpacked))):
            # It is of use whenever the hand-over ends.
            raise Broken("what came of a prefix has a gap")
    completed = receiver is ReceiverState.COMPLETED
    if completed:
        if unpacked != tuple(range(cached, end)):
            raise Broken("a hand-over is complete and lacks KV")
        if local.landing:
            raise Broken("a hand-over is complete and a KV chunk is still landing")
    both_live = local.sender_life is Life.ALIVE is local.receiver_life
    if sender is SenderState.COMPLETED and both_live and not completed:
        raise Broken("the sender takes a hand-over for complete that is not")


def unfinished(local: Local) -> str:
    """What is still owed when nothing can happen any more, or nothing."""
    sender, receiver = SenderSide(*thawed(local.sender)), ReceiverSide(*thawed(local.receiver))
    if local.sender_life is Life.ALIVE and (not sender.ended or local.sent or local.packing):
        return f"the sender is {sender.state.value}"
    if local.receiver_life is Life.ALIVE:
        if not receiver.ended or local.credited or local.landing:
            return f"the receiver is {receiver.state.value}"
        if local.held and receiver.state is not ReceiverState.COMPLETED:
            return "the receiver still holds blocks"
    return ""
