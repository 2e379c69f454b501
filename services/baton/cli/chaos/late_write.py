"""`baton chaos kv late-write`: a giver freezes amid reads, its reader gives up, then it is back.

With NIXL alone, what was posted then still lands in memory that is in use again. Here it may land
in slots only, which are out of use until it has: the bytes that came late there show that the
experiment bites, and none may be found anywhere else.
"""

from __future__ import annotations

import argparse
import random

from baton.cli.chaos.peers import Broken, Peer, result, until
from baton.cli.chaos.settings import Settings
from baton.cli.chaos.world import World, right
from baton.cli.results import Result, at_most, compared
from baton.kv.parcel import HEADER_BYTES

MIB = 1 << 20
PARCELS = 4
LAYERS = 64
TOLD_S = 0.05
"""Until what a giver has told before it freezes is with its collector."""


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken when a process is gone or does not answer."""
    draw = random.Random(args.seed)
    slot_bytes = args.slot_mib * MIB
    per_slot = (slot_bytes - HEADER_BYTES) // (128 * LAYERS)
    settings = Settings(
        transport=args.transport,
        num_slots=8,
        slot_bytes=slot_bytes,
        layers=LAYERS,
        positions=PARCELS * per_slot,
        chunk=PARCELS * per_slot,
        missed=15,
    )
    bitten = late = lost = changed = elsewhere = 0
    with World(settings, draw, args.ucx_tls) as world:
        spare = Peer("giver", settings, args.ucx_tls)
        try:
            world.hand_over()
            for _ in range(args.count):
                limbo, landed, there, right_there = _run(world, spare)
                bitten += limbo > 0
                late += landed
                changed += there
                elsewhere += right_there
                lost += not world.giver.alive
        finally:
            spare.end()
    return [
        Result("runs", args.count, ""),
        Result("runs with reads in limbo", bitten, ""),
        Result("bytes that came late, into slots in limbo", late, "B"),
        at_most("bytes that changed in blocks, guards and slots nobody had", changed, "B", 0),
        compared("hand-overs from another giver meanwhile, right", elsewhere, "", args.count, 1.0),
        at_most("givers that did not come back", lost, "", 0),
    ]


def _run(world: World, spare: Peer) -> tuple[int, int, int, bool]:
    """Slots in limbo, bytes that came late, bytes changed elsewhere, and whether others went on."""
    giver, collector, draw = world.giver, world.collector, world.draw
    for peer in (giver, collector):
        peer.ask("reset")
    handover_id = world.new_id()
    # Reads begin about when the giver freezes, some before and some after.
    at, point = draw.randint(2, PARCELS), "giver.slot_taken"
    giver.ask("arm", faults=f"delay@{point}:at={at},seconds={TOLD_S};freeze@{point}:at={at}")
    pause = draw.uniform(0.5, 2) * TOLD_S
    collector.ask("arm", faults=f"delay@collector.reading:seconds={pause}")
    world.offer(handover_id)
    taken = world.collect(handover_id)
    until(lambda: giver.frozen, "the giver to freeze")
    said = result(taken, "the hand-over to be given up")
    if said["outcome"] != "HandoverFailed" or said["wrong"]:
        raise Broken(f"the hand-over ended as {said['outcome']}")
    limbo = collector.ask("state")["limbo"]
    world.peers["giver"] = spare
    try:
        meanwhile = world.hand_over(collector={"faults": ""})
    finally:
        world.peers["giver"] = giver
    collector.ask("snapshot")
    giver.thaw()
    world.settle()
    late = collector.ask("late")
    changed = sum(peer.ask("state", look=True)["changed"] for peer in (giver, collector))
    giver.ask("arm", faults="")
    return (
        limbo,
        late["bytes"],
        changed + late["blocks"],
        right(meanwhile, world.settings.positions),
    )
