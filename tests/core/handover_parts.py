"""The values of the hand-over explorer: states, moves, faults and what must hold of a hand-over."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum, auto
from typing import Any, NamedTuple

from baton.core.handover import CollectorSide, CollectorState, GiverSide, GiverState, Run
from baton.core.slot_states import SlotEvent

POSITIONS = 3
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
    run: Run
    slot: int
    source: int
    phase: Phase


class SlotUse(NamedTuple):
    """ring: "giver" or "collector". event: None when a slot is written to. parcel: what a giver's
    slot holds from now on; None: of no use."""

    ring: str
    slot: int
    event: SlotEvent | None
    parcel: int | None = None


class Local(NamedTuple):
    """Everything about one hand-over. computed: positions, -1 before its first chunk is planned.
    sent: (parcel, slot) until confirmed. held: whether the collector owns blocks for it."""

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


class Offers(NamedTuple):
    """What the world has for a hand-over: a free slot of each ring, or -1; for each landing whether
    its source still holds the parcel that was announced; and whether anything has gone wrong."""

    giver_slot: int
    landing_slot: int
    fresh: tuple[bool, ...]
    troubled: bool


class Move(NamedTuple):
    """What can happen next. fault: it counts as one."""

    name: str
    after: Local
    uses: tuple[SlotUse, ...]
    fault: bool


class Broken(AssertionError):
    """A promise does not hold."""


def begin() -> Local:
    return Local(of_side(GiverSide(POSITIONS)), of_side(CollectorSide(POSITIONS, PER_PARCEL)))


def of_side(side: GiverSide | CollectorSide) -> tuple[Any, ...]:
    found = (getattr(side, each.name) for each in fields(side))
    return tuple(frozenset(value) if isinstance(value, set) else value for value in found)


def thawed(side: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(set(value) if isinstance(value, frozenset) else value for value in side)


def check(local: Local) -> None:
    """What holds of one hand-over at every moment. Raises Broken."""
    giver, collector = GiverSide(*thawed(local.giver)), CollectorSide(*thawed(local.collector))
    if len(set(local.unpacked)) != len(local.unpacked):
        raise Broken("a position was unpacked twice")
    if any(not local.cached <= position < local.computed for position in local.unpacked):
        raise Broken("a position was unpacked that was not computed, or was there already")
    if collector.state is CollectorState.COMPLETED:
        if sorted(local.unpacked) != list(range(local.cached, POSITIONS)):
            raise Broken("a hand-over is complete and lacks KV")
        if local.landing:
            raise Broken("a hand-over is complete and a parcel is still landing")
    both_live = local.giver_life is Life.ALIVE is local.collector_life
    completed = collector.state is CollectorState.COMPLETED
    if giver.state is GiverState.COMPLETED and both_live and not completed:
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
