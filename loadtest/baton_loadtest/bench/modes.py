"""Exact mode on and off side by side in one process, and batch 1 beside memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.core.scheduler.plan import ModelRunner
from baton_loadtest.bench.bandwidth import read_bandwidth
from baton_loadtest.bench.child import progress
from baton_loadtest.bench.serving import GROWTH, attempt, open_loop, open_runner, policy, step
from baton_loadtest.bench.steps import StepTimer

ROUNDS = 3
ALONE_PROMPT = 128
MODES = {"exact": True, "not exact": False}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batches, context, prefill (its length), chunk, tokens (at batch 1),
    megabytes (that bandwidth is measured over).

    Returns for each mode the best seconds of three rounds, modes taking turns: "decode BATCH" (a
    step), "prefill", and "alone" (one token at batch 1, through the scheduler, at `alone_context`
    positions on average); read bandwidth in bytes a second; and whether the exact runner is exact.
    """
    positions = max(
        max(job["batches"]) * (job["context"] + GROWTH),
        job["prefill"],
        ALONE_PROMPT + job["tokens"] + GROWTH,
    )
    runners = {
        mode: open_runner(job["model"], job["threads"], positions, exact=exact)
        for mode, exact in MODES.items()
    }
    timers = {mode: StepTimer(runner) for mode, runner in runners.items()}
    cases: dict[str, Callable[[StepTimer], float]] = {
        f"decode {batch}": partial(StepTimer.decode, batch=batch, context=job["context"])
        for batch in job["batches"]
    }
    cases["prefill"] = lambda timer: timer.prefill(job["prefill"], job["chunk"])
    cases["alone"] = lambda timer: _alone(timer.runner, job["tokens"])
    best = {mode: dict.fromkeys(cases, float("inf")) for mode in MODES}
    bandwidth = 0.0
    for number in range(ROUNDS):
        for case, measure in cases.items():
            for mode, timer in timers.items():
                best[mode][case] = min(best[mode][case], measure(timer))
        bandwidth = max(bandwidth, read_bandwidth(job["megabytes"]))
        progress(f"exact and not exact, round {number + 1} of {ROUNDS}")
    return {
        "is_exact": runners["exact"].exact,
        "bandwidth": bandwidth,
        "alone_context": ALONE_PROMPT + job["tokens"] / 2,
        **best,
    }


def _alone(runner: ModelRunner, tokens: int) -> float:
    """Seconds per token of one sequence, without its first."""
    loop = open_loop(runner, policy(1, ALONE_PROMPT + 1))
    loop.scheduler.add(attempt("alone", range(3, 3 + ALONE_PROMPT), tokens), time.monotonic())
    while not step(loop):
        pass
    began = time.perf_counter()
    while loop.scheduler.has_work:
        step(loop)
    return (time.perf_counter() - began) / (tokens - 1)
