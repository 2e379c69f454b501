"""The values of the hand-over explorer: states, moves, faults and what must hold of a hand-over."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple

from baton.core.handover import CollectorSide, CollectorState, GiverSide, GiverState, Run, State
from baton.core.slot_states import SlotEvent

PER_PARCEL = 1

Message = tuple[Any, ...]


class Mutation(Enum):
    """A seeded fault of the protocol, which the explorer must find."""

    FORGET_TO_CONFIRM = auto()
    FREE_WHEN_SENT = auto()
    ACCEPT_UNVERIFIED = auto()
    FREE_WHILE_LENT = auto()
    CREDIT_WITHOUT_SLOT = auto()
    FREE_WHILE_PACKING = auto()
    KEEP_SLOTS_AT_THE_END = auto()
    CONFIRM_BEFORE_UNPACKING = auto()


class Life(Enum):
    """Of a process: a frozen one does nothing and is not noticed by its reads."""

    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class Phase(Enum):
    """Of a parcel at the collector. STUCK: its read does not end in time, if ever."""

    READ = auto()
    STUCK = auto()
    UNPACK = auto()


class Landing(NamedTuple):
    """source: the giver's slot, or None once that holds something else or does not matter."""

    run: Run
    slot: int
    source: int | None
    phase: Phase


class SlotUse(NamedTuple):
    """ring: "giver" or "collector". event: None when its holder writes to it. pretended: its holder
    takes it to be so, and it is not."""

    ring: str
    slot: int
    event: SlotEvent | None
    pretended: bool = False


class Local(NamedTuple):
    """Everything about one hand-over. giver, collector: the fields of its sides. computed:
    positions, -1 before its first chunk is planned. sent: (parcel, slot) until confirmed. unpacked:
    positions, in order. held: whether the collector owns blocks for it."""

    giver: tuple[Any, ...]
    collector: tuple[Any, ...]
    to_giver: tuple[Message, ...] = (("open",),)
    to_collector: tuple[Message, ...] = ()
    unbroken: bool = True
    computed: int = -1
    packing: tuple[Run, int] | None = None
    sent: tuple[tuple[int, int], ...] = ()
    credited: tuple[int, ...] = ()
    landing: tuple[Landing, ...] = ()
    unpacked: tuple[int, ...] = ()
    cached: int = 0
    held: bool = False
    giver_life: Life = Life.ALIVE
    collector_life: Life = Life.ALIVE


class Move(NamedTuple):
    """What can happen next, if the slots that it takes are free."""

    after: Local
    uses: tuple[SlotUse, ...]


class Broken(AssertionError):
    """A promise does not hold."""


def begin(num_positions: int) -> Local:
    giver, collector = GiverSide(num_positions), CollectorSide(num_positions, PER_PARCEL)
    return Local(of_side(giver), of_side(collector))


_FIELDS = {side: attrgetter(*(f.name for f in fields(side))) for side in (GiverSide, CollectorSide)}


def of_side(side: GiverSide | CollectorSide) -> tuple[Any, ...]:
    return tuple([frozenset(v) if type(v) is set else v for v in _FIELDS[type(side)](side)])


def thawed(side: tuple[Any, ...]) -> list[Any]:
    return [set(value) if type(value) is frozenset else value for value in side]


def check(local: Local, giver: State, collector: State) -> None:
    """What holds of one hand-over, whose sides are in these states, at every moment.

    Raises Broken.
    """
    unpacked, computed, cached = local.unpacked, local.computed, local.cached
    if unpacked:
        if len(set(unpacked)) != len(unpacked):
            raise Broken("a position was unpacked twice")
        if unpacked[0] < cached or unpacked[-1] >= computed:
            raise Broken("a position was unpacked that was not computed, or was there already")
    completed = collector is CollectorState.COMPLETED
    if completed:
        if unpacked != tuple(range(cached, local.giver[0])):
            raise Broken("a hand-over is complete and lacks KV")
        if local.landing:
            raise Broken("a hand-over is complete and a parcel is still landing")
    both_live = local.giver_life is Life.ALIVE is local.collector_life
    if giver is GiverState.COMPLETED and both_live and not completed:
        raise Broken("the giver takes a hand-over for complete that is not")


def unfinished(local: Local) -> str:
    """What is still owed when nothing can happen any more, or nothing."""
    giver, collector = GiverSide(*thawed(local.giver)), CollectorSide(*thawed(local.collector))
    if local.giver_life is Life.ALIVE and (not giver.ended or local.sent or local.packing):
        return f"the giver is {giver.state.value}"
    if local.collector_life is Life.ALIVE:
        if not collector.ended or local.credited or local.landing:
            return f"the collector is {collector.state.value}"
        if local.held and collector.state is not CollectorState.COMPLETED:
            return "the collector still holds blocks"
    return ""
