"""`baton chaos kv clean`: undamaged KV chunks; none may be reported as damaged."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from baton_loadtest.chaos.sides import Settings
from baton_loadtest.chaos.world import World, right
from baton_loadtest.report import Result, at_most, compared

PER_BUFFER = 15
PER_HANDOVER = 60


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a process has ended or does not answer."""
    per = min(PER_HANDOVER, args.count)
    settings = replace(
        Settings(transport=args.transport, memory=args.memory).patient,
        positions=per * PER_BUFFER,
        chunk=5 * PER_BUFFER,
    )
    handovers = -(-args.count // per)
    complete = 0
    with World(settings, random.Random(args.seed), args.ucx_tls) as world:
        for _ in range(handovers):
            complete += right(world.hand_over(), settings.positions)
        world.settle()
        alarms = sum(world.receiver.ask("state")["mismatches"].values())
    return [
        compared("hand-overs with every byte right", complete, "", handovers, 1.0),
        Result("kv_chunks", handovers * per, ""),
        at_most("KV chunks taken for damaged", alarms, "", 0),
    ]
