"""`baton chaos kv late-write`: a sender freezes during reads, its reader gives up, it is thawed.

With NIXL alone, reads posted before could still write to memory that is in use again. Here they may
write only to buffers that stay out of use until then. Late bytes in these buffers show that the
experiment works; there must be none anywhere else.
"""

from __future__ import annotations

import argparse
import random

from baton_loadtest.chaos.sides import Settings
from baton_loadtest.chaos.world import Broken, Peer, World, result, right, until
from baton_loadtest.report import Result, at_most, compared
from batonlm.transfer.kv_chunk import HEADER_BYTES

MIB = 1 << 20
KV_CHUNKS = 4
LAYERS = 64
TOLD_S = 0.25
"""Time for messages of a sender to reach its receiver before it freezes."""


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a process has ended or does not answer."""
    draw = random.Random(args.seed)
    buffer_bytes = args.slot_mib * MIB
    per_buffer = (buffer_bytes - HEADER_BYTES) // (128 * LAYERS)
    settings = Settings(
        transport=args.transport,
        memory=args.memory,
        num_buffers=8,
        buffer_bytes=buffer_bytes,
        layers=LAYERS,
        positions=KV_CHUNKS * per_buffer,
        chunk=KV_CHUNKS * per_buffer,
        missed=15,
    )
    bitten = late = lost = changed = elsewhere = 0
    with World(settings, draw, args.ucx_tls) as world:
        spare = Peer("sender", settings, args.ucx_tls)
        try:
            world.hand_over()
            for _ in range(args.count):
                orphaned, landed, there, right_there = _run(world, spare)
                bitten += orphaned > 0
                late += landed
                changed += there
                elsewhere += right_there
                lost += not world.sender.alive
        finally:
            spare.end()
    return [
        Result("runs", args.count, ""),
        Result("runs with reads orphaned", bitten, ""),
        Result("bytes that came late, into buffers orphaned", late, "B"),
        at_most("bytes that changed in blocks, guards and buffers nobody had", changed, "B", 0),
        compared("hand-overs from another sender meanwhile, right", elsewhere, "", args.count, 1.0),
        at_most("senders that did not come back", lost, "", 0),
    ]


def _run(world: World, spare: Peer) -> tuple[int, int, int, bool]:
    """Returns buffers orphaned, late bytes, bytes changed elsewhere, whether other hand-overs went
    on."""
    sender, receiver, draw = world.sender, world.receiver, world.draw
    for peer in (sender, receiver):
        peer.ask("reset")
    handover_id = world.new_id()
    # Reads begin about when the sender freezes, some before and some after.
    at, point = draw.randint(2, KV_CHUNKS), "sender.buffer_taken"
    sender.ask("arm", faults=f"delay@{point}:at={at},seconds={TOLD_S};freeze@{point}:at={at}")
    pause = draw.uniform(0.5, 2) * TOLD_S
    receiver.ask("arm", faults=f"delay@receiver.reading:seconds={pause}")
    world.offer(handover_id)
    taken = world.collect(handover_id)
    until(lambda: sender.frozen, "the sender to freeze")
    ended = result(taken, "the hand-over to be given up")
    if ended["outcome"] != "HandoverFailed" or ended["wrong"]:
        raise Broken(f"the hand-over ended as {ended['outcome']}")
    orphaned = receiver.ask("state")["orphaned"]
    world.peers["sender"] = spare
    try:
        meanwhile = world.hand_over(receiver={"faults": ""})
    finally:
        world.peers["sender"] = sender
    receiver.ask("snapshot")
    sender.thaw()
    world.settle()
    late = receiver.ask("late")
    changed = sum(peer.ask("state", look=True)["changed"] for peer in (sender, receiver))
    sender.ask("arm", faults="")
    return (
        orphaned,
        late["bytes"],
        changed + late["blocks"],
        right(meanwhile, world.settings.positions),
    )
