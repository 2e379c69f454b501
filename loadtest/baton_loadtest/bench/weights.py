"""`baton bench weights`: quantised checkpoints that stay quantised, against the plain one.

In float32 their tokens are those of the numbers that they stand for, which torch's own products of
4 and 8 bits do not give: weights are widened at each step. In bfloat16 torch's products take the
codes. Both are measured beside the plain checkpoint in the same type, all in one process, taking
turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import StepTimer
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call
from baton_loadtest.report import Report, Result
from batonlm.engine.config import configure_threads

PLOTS = False
OPTIONS = (
    *engine(threads=2),
    option("--batches", (1, 8, 32)),
    option("--context", 128, "positions"),
    option("--prompt", 512, "tokens of a prompt, computed in one step"),
    option("--rounds", 3, "in which the contenders take turns; the best one counts"),
)
DEADLINE_S = 900.0
PLAIN = "plain"
KINDS = {
    "4 bits, groups of 32": "compressed w4a16",
    "int8 by output": "compressed int8",
    "fp8 by output": "compressed fp8 by output",
}
"""Of `quantised.KINDS`, by what the figures call them."""
DTYPES = ("float32", "bfloat16")


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if the engine cannot run."""
    job = {
        "model": str(engines.folder(args.shape)),
        "threads": args.threads,
        "batches": args.batches,
        "context": args.context,
        "prompt": args.prompt,
        "rounds": args.rounds,
    }
    found = call(run_weights, job, threads=args.threads, deadline_s=DEADLINE_S)
    results = []
    for name, one in found.items():
        results.append(Result(f"{name}: weights", one["weights_bytes"] / 2**20, "MiB"))
        plain = found[f"{PLAIN}, {name.rpartition(', ')[2]}"]["seconds"]
        for case, seconds in one["seconds"].items():
            against = None if name.startswith(PLAIN) else 1000 * plain[case]
            ratio = None if against is None else seconds / plain[case]
            results.append(Result(f"{name}: {case}", 1000 * seconds, "ms", against, ratio))
    return Report(results)


def run_weights(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, batches, context, prompt, rounds. Returns for each contender
    weights_bytes, and the best seconds by case."""
    positions = max(max(job["batches"]) * (job["context"] + engines.GROWTH), job["prompt"])
    timers: dict[str, StepTimer] = {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {PLAIN: job["model"]}
        configure_threads(job["threads"])
        from baton_loadtest import quantised

        for name, kind in KINDS.items():
            made, reference = quantised.write(kind, Path(job["model"]), Path(folder, name))
            models[name] = str(made)
            (reference / "model.safetensors").unlink()
        for dtype in DTYPES:
            for name, model in models.items():
                whole = f"{name}, {dtype}"
                runner = engines.open_runner(model, job["threads"], positions, dtype=dtype)
                timers[whole] = StepTimer(runner)
                taken = engines.weights_bytes(model, dtype=dtype)
                found[whole] = {"weights_bytes": taken, "seconds": {}}
                progress(f"{whole} is open")
    cases: dict[str, Callable[[StepTimer], float]] = {
        f"step of {batch}": partial(StepTimer.decode, batch=batch, context=job["context"])
        for batch in job["batches"]
    }
    length = job["prompt"]
    cases[f"prompt of {length}"] = lambda timer: timer.prefill(length, length)
    for _ in range(job["rounds"]):
        for case, measured in cases.items():
            for name, timer in timers.items():
                best = found[name]["seconds"]
                best[case] = min(best.get(case, float("inf")), measured(timer))
    return found
