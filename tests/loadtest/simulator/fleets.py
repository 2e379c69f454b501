"""Small fleets and their traffic, for tests of the simulator."""

from __future__ import annotations

from random import Random

from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.settings import Delays, FleetFacts, RouterFacts, WorkerFacts
from batonlm.core.routing.load import WorkerSpeed

SPEED = WorkerSpeed(
    step_s=0.01,
    row_s=1e-4,
    context_s=1e-7,
    prefill_step_s=0.004,
    prefill_position_s=3e-5,
    prefill_read_s=1e-9,
    link_bytes_per_s=1e9,
    handover_s=0.003,
)


def fleet(
    prefills: int = 1,
    decodes: int = 2,
    *,
    blocks: int = 2000,
    max_running: int = 32,
    skip: bool = True,
    hop_s: float = 0.001,
) -> FleetFacts:
    return FleetFacts(
        WorkerFacts(SPEED, blocks, 16, 512),
        WorkerFacts(SPEED, blocks, 16, 256, max_running),
        prefills,
        decodes,
        kv_bytes=1000,
        router=RouterFacts(max_queue_s=30.0),
        delays=Delays(hop_s=hop_s),
        skip=skip,
    )


def traffic(seed: int, count: int, per_s: float, longest: int = 2000) -> list[Request]:
    """Conversations that go on from shared beginnings."""
    draw = Random(seed)
    time, found = 0.0, []
    for _ in range(count):
        time += draw.expovariate(per_s)
        size = draw.randint(1, longest)
        beginning = draw.randrange(3)
        names = tuple(1000 * beginning + n for n in range(draw.randint(0, 1 + size // 512)))
        found.append(Request(time, size, draw.choice((1, 2, draw.randint(3, 200))), names))
    return found
