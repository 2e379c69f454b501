"""Every interleaving of a giver and a collector, with every fault at every point, breadth first.

The two sides are production's own; what is modelled here is what surrounds them: an engine that
computes, two FIFO queues that are one stream, rings of few slots, and reads that end well, badly,
late or never. Explored states are checked, not sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.core.handover import (
    CollectorSide,
    CollectorState,
    GiverSide,
    GiverState,
    HandoverEvent,
    Run,
)

POSITIONS, PER_PARCEL, RING = 3, 2, 2
Message = tuple[Any, ...]


@dataclass
class World:
    """One state of everything. to_giver and to_collector are the stream's two directions."""

    giver: GiverSide = field(default_factory=lambda: GiverSide(POSITIONS))
    collector: CollectorSide = field(default_factory=lambda: CollectorSide(POSITIONS, PER_PARCEL))
    to_giver: list[Message] = field(default_factory=lambda: [("open",)])
    to_collector: list[Message] = field(default_factory=list)
    broken: bool = False
    planned: bool = False
    computed: int = 0
    sampled: bool = False
    packing: Run | None = None
    giver_slots: int = 0
    landing_slots: int = 0
    reads: dict[int, Run] = field(default_factory=dict)
    limbo: int = 0
    unpacked: list[int] = field(default_factory=list)
    cached: int = 0

    def key(self) -> str:
        return repr(self)


def put(world: World, queue: list[Message], *message: Any) -> None:
    if not world.broken:
        queue.append(message)


def end_giver(world: World, event: HandoverEvent, tell: bool = False) -> None:
    world.giver.end(event)
    world.giver_slots = 0
    world.packing = None
    if tell:
        put(world, world.to_collector, "failed")


def end_collector(world: World, event: HandoverEvent, tell: bool = False) -> None:
    world.collector.end(event)
    world.limbo += len(world.reads)
    world.reads = {}
    world.landing_slots = 0
    if tell:
        put(world, world.to_giver, "failed")


def giver_hears(world: World) -> None:
    side, (kind, *arguments) = world.giver, world.to_giver.pop(0)
    if side.ended:
        return
    match kind:
        case "open":
            side.opened(PER_PARCEL)
        case "granted":
            side.granted(*arguments)
        case "full":
            side.refused()
        case "credit":
            side.credited(1)
        case "collected":
            side.collected(*arguments)
            world.giver_slots -= 1
        case "completed":
            side.completed()
            world.giver_slots = 0
        case "failed":
            end_giver(world, HandoverEvent.PEER_FAILED)


def collector_hears(world: World) -> None:
    side, (kind, *arguments) = world.collector, world.to_collector.pop(0)
    if side.ended:
        return
    match kind:
        case "announced":
            side.announced(POSITIONS)
        case "finished":
            side.advanced(*arguments)
        case "parcel":
            side.arriving(*arguments)
            world.reads[arguments[0].index] = arguments[0]
        case "tokens":
            side.tokens()
        case "failed":
            end_collector(world, HandoverEvent.PEER_FAILED)


def land(world: World, index: int) -> None:
    run = world.reads.pop(index)
    world.unpacked += range(run.first_position, run.first_position + run.num_positions)
    world.landing_slots -= 1
    world.collector.landed(index)
    put(world, world.to_giver, "collected", index)


def fail_read(world: World, index: int) -> None:
    del world.reads[index]
    end_collector(world, HandoverEvent.CANCEL, tell=True)


def grant(world: World, from_position: int) -> None:
    world.cached = from_position
    world.collector.granted(from_position)
    put(world, world.to_giver, "granted", from_position)


def refuse(world: World) -> None:
    world.collector.full()
    put(world, world.to_giver, "full")


def credit(world: World) -> None:
    world.landing_slots += 1
    world.collector.credited()
    put(world, world.to_giver, "credit")


def complete(world: World) -> None:
    world.collector.completed()
    put(world, world.to_giver, "completed")


def announce(world: World) -> None:
    world.giver.announced()
    put(world, world.to_collector, "announced")


def tell_finished(world: World) -> None:
    assert world.giver.advanced(world.computed)
    put(world, world.to_collector, "finished", world.giver.finished)


def pack(world: World) -> None:
    world.packing = world.giver.next_run()
    world.giver_slots += 1


def send(world: World) -> None:
    run, world.packing = world.packing, None
    assert run is not None
    world.giver.sent(run.index)
    put(world, world.to_collector, "parcel", run)


def tell_tokens(world: World) -> None:
    world.giver.tokens()
    put(world, world.to_collector, "tokens")


def break_stream(world: World) -> None:
    world.broken = True
    world.to_giver, world.to_collector = [], []


def setattr_(name: str, value: object) -> Callable[[World], None]:
    return lambda world: setattr(world, name, value)


def steps(world: World, faults: bool) -> Iterator[tuple[str, Callable[[World], None]]]:
    """Everything that can happen next."""
    giver, collector = world.giver, world.collector
    if not world.planned:
        yield "plan", setattr_("planned", True)
    elif world.computed < POSITIONS:
        yield "compute", setattr_("computed", world.computed + 1)
    elif not world.sampled:
        yield "sample", setattr_("sampled", True)
    if world.to_giver:
        yield "giver hears", giver_hears
    if world.to_collector:
        yield "collector hears", collector_hears

    if giver.state is GiverState.OPENED and world.planned:
        yield "announce", announce
    if giver.state is GiverState.GIVING and world.computed > giver.finished:
        yield "finished", tell_finished
    if (
        world.packing is None
        and world.giver_slots < RING
        and copy.deepcopy(giver).next_run() is not None
    ):
        yield "pack", pack
    if world.packing is not None and not giver.ended:
        yield "send", send
    if giver.wants_tokens and world.sampled:
        yield "tokens", tell_tokens

    if collector.state is CollectorState.RESERVING:
        for cached in range(POSITIONS + 1):
            yield "grant", lambda w, cached=cached: grant(w, cached)  # type: ignore[misc]
        yield "full", refuse
    if collector.wants_credit and world.landing_slots < RING:
        yield "credit", credit
    for index in world.reads:
        yield "land", lambda w, index=index: land(w, index)  # type: ignore[misc]
    if collector.all_in:
        yield "complete", complete
    if world.limbo:
        yield "late end of a read", setattr_("limbo", world.limbo - 1)

    # Once a side has ended, its half of the stream does, after what it said.
    if not giver.ended and not world.to_giver and (world.broken or collector.ended):
        yield "giver loses peer", lambda w: end_giver(w, HandoverEvent.PEER_LOST)
    if not collector.ended and not world.to_collector and (world.broken or giver.ended):
        yield "collector loses peer", lambda w: end_collector(w, HandoverEvent.PEER_LOST)

    if faults:
        if not world.broken and not (giver.ended and collector.ended):
            yield "stream breaks", break_stream
        for event in (HandoverEvent.CANCEL, HandoverEvent.DEADLINE):
            if not giver.ended:
                yield "giver ends", lambda w, e=event: end_giver(w, e, tell=True)  # type: ignore[misc]
            if not collector.ended:
                yield (
                    "collector ends",
                    lambda w, e=event: end_collector(w, e, tell=True),  # type: ignore[misc]
                )
        for index in world.reads:
            yield "read fails", lambda w, index=index: fail_read(w, index)  # type: ignore[misc]


def check(world: World) -> None:
    giver, collector = world.giver, world.collector
    if giver.ended:
        assert world.giver_slots == 0
    else:
        assert world.giver_slots == len(giver.outstanding) + (world.packing is not None)
    if collector.ended:
        assert world.landing_slots == 0 and not world.reads
    else:
        assert world.landing_slots == collector.credits + len(collector.landing)
    assert len(world.unpacked) == len(set(world.unpacked))
    assert all(world.cached <= position < world.computed for position in world.unpacked)
    if giver.state is GiverState.COMPLETED:
        assert collector.state is CollectorState.COMPLETED
    if collector.state is CollectorState.COMPLETED:
        assert sorted(world.unpacked) == list(range(world.cached, POSITIONS))
        assert collector.has_tokens


def explore(faults: bool) -> tuple[int, set[tuple[GiverState, CollectorState]]]:
    """All states reached, counted, and the pairs in which everything came to rest.

    Raises when a side accuses its peer (HandoverFailed): correct sides never do.
    """
    start = World()
    seen, frontier = {start.key()}, [start]
    rests: set[tuple[Any, Any]] = set()
    while frontier:
        world = frontier.pop()
        check(world)
        moved = False
        for _, step in steps(world, faults):
            moved = True
            after = copy.deepcopy(world)
            step(after)
            if (key := after.key()) not in seen:
                seen.add(key)
                frontier.append(after)
        if not moved:
            assert world.limbo == 0
            rests.add((world.giver.state, world.collector.state))
    return len(seen), rests


def test_without_faults_everything_comes_to_its_proper_end() -> None:
    states, rests = explore(faults=False)
    assert states > 1000
    assert rests == {
        (GiverState.COMPLETED, CollectorState.COMPLETED),
        (GiverState.REFUSED, CollectorState.FULL),
    }


@pytest.mark.timeout(300)
def test_with_faults_both_sides_always_end() -> None:
    states, rests = explore(faults=True)
    assert states > 10_000
    assert all(not_going not in {s for pair in rests for s in pair} for not_going in GOING)
    assert (GiverState.COMPLETED, CollectorState.FAILED) not in rests


GOING = {
    GiverState.OFFERED,
    GiverState.OPENED,
    GiverState.ANNOUNCED,
    GiverState.GIVING,
    GiverState.GIVEN,
    CollectorState.OPENING,
    CollectorState.RESERVING,
    CollectorState.TAKING,
}
