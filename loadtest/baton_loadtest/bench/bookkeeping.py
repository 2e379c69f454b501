"""What scheduler and blocks cost, with no model: time per step, unused memory, memory shared."""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.rpc import garbage
from baton_loadtest.bench import blocks
from baton_loadtest.bench.replay import made_up
from baton_loadtest.bench.serving import attempt

TIMED_STEPS = 400
REQUESTS = 256


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: seed, sequences (of the scheduler that is timed), lengths (a CSV file or "").

    Returns step_s, the scheduler's own seconds of every step; waste for each mix of lengths; and
    sharing for each kind of shared prefix.
    """
    seed = job["seed"]
    mixes = {"short requests": blocks.short_lengths(seed, REQUESTS)}
    if job["lengths"]:
        mixes["recorded requests"] = blocks.read_lengths(Path(job["lengths"]), REQUESTS)
    else:
        mixes["chat requests"] = blocks.chat_lengths(seed, REQUESTS)
    kinds = {
        "8 system prompts, 256 users": blocks.users_of_system_prompts(seed),
        "4 choices of each request": blocks.four_choices(seed),
    }
    return {
        "step_s": step_times(job["sequences"], seed),
        "waste": {name: asdict(blocks.waste(lengths, seed)) for name, lengths in mixes.items()},
        "sharing": {name: asdict(blocks.sharing(asked)) for name, asked in kinds.items()},
    }


def step_times(sequences: int, seed: int) -> list[float]:
    """Seconds that planning and applying take together while so many sequences decode."""
    draw = random.Random(seed)
    scheduler = blocks.scheduler(sequences)
    output = sequences + TIMED_STEPS * 2
    for index in range(sequences):
        prompt = [draw.randrange(blocks.VOCAB) for _ in range(draw.randint(128, 512))]
        scheduler.add(attempt(str(index), prompt, output), 0.0)
    # As workers do once they are loaded.
    garbage.settle()
    times: list[float] = []
    while len(times) < TIMED_STEPS:
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = made_up(plan)
        resumed = time.perf_counter()
        scheduler.apply(result, 0.0)
        ended = time.perf_counter()
        if sum(len(chunk.token_ids) == 1 for chunk in plan.chunks) == sequences:
            times.append(planned - began + ended - resumed)
    return times
