"""`baton bench cost`: what a decode step, a prompt, the scheduler and the blocks cost.

Decode steps are timed for each batch and context whose KV fits; prompts in chunks of each size. The
scheduler is timed alone, with made-up results.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from baton_loadtest.bench import shapes
from baton_loadtest.bench.child import progress
from baton_loadtest.bench.process import call, cores
from baton_loadtest.bench.serving import BLOCK_SIZE, open_runner
from baton_loadtest.bench.steps import StepTimer
from baton_loadtest.report import Chart, Line, Report, Result, at_most, quantile

DEADLINE_S = 600.0
SCHEDULER_US = 300.0
UNUSED_PERCENT = 4.0
REPEATED = 1024
"""Prompts up to this long are timed three times."""


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed when the engine cannot run."""
    threads = min(args.threads, cores())
    model = shapes.folder(args.shape)
    settings = shapes.config(model)
    room = int(args.kv_gb * 1e9 / shapes.kv_bytes(settings))
    grid = [batch * (context + BLOCK_SIZE) for batch in args.batches for context in args.contexts]
    positions = max([max(args.prompts), *(wanted for wanted in grid if wanted <= room)])
    job = {
        "model": str(model),
        "threads": threads,
        "device": args.device,
        "exact": args.exact,
        "positions": positions,
        "contexts": args.contexts,
        "batches": args.batches,
        "prompts": args.prompts,
        "chunks": args.chunks,
    }
    steps = call("cost", job, threads=threads, deadline_s=DEADLINE_S)
    lengths = str(args.lengths.resolve()) if args.lengths else ""
    job = {"seed": args.seed, "sequences": args.sequences, "lengths": lengths}
    books = call("bookkeeping", job, threads=1, deadline_s=DEADLINE_S)
    return Report(
        [*_steps(steps), *_scheduler(books, args.sequences), *_waste(books), *_sharing(books)],
        (_decode_chart(steps, args), _prefill_chart(steps, args)),
    )


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, device, exact, positions, contexts, batches, prompts, chunks.

    Returns decode as (batch, context, seconds) and prefill as (chunk, prompt tokens, seconds), for
    what fits.
    """
    runner = open_runner(
        job["model"], job["threads"], job["positions"], exact=job["exact"], device=job["device"]
    )
    timer = StepTimer(runner)
    decode, prefill = [], []
    for batch in job["batches"]:
        fitting = [context for context in job["contexts"] if timer.fits(batch, context)]
        decode += [(batch, context, timer.decode(batch, context)) for context in fitting]
        progress(f"decode at batch {batch}: contexts {fitting}")
    for chunk in job["chunks"]:
        fitting = [length for length in job["prompts"] if timer.fits(1, length)]
        for length in fitting:
            repeats = 3 if length <= REPEATED else 1
            prefill.append(
                (chunk, length, min(timer.prefill(length, chunk) for _ in range(repeats)))
            )
        progress(f"prefill in chunks of {chunk}: {fitting} tokens")
    return {"decode": decode, "prefill": prefill}


def _steps(steps: dict[str, Any]) -> list[Result]:
    decode = [
        Result(f"decode step, batch {batch}, context {context}", 1000 * seconds, "ms")
        for batch, context, seconds in steps["decode"]
    ]
    prefill = [
        Result(f"prefill of {length} in chunks of {chunk}", length / seconds, "tokens/s")
        for chunk, length, seconds in steps["prefill"]
        if length >= chunk or chunk == min(c for c, _, _ in steps["prefill"])
    ]
    return decode + prefill


def _scheduler(books: dict[str, Any], sequences: int) -> list[Result]:
    times = [1e6 * seconds for seconds in books["step_s"]]
    name = f"scheduler, per step of {sequences} sequences"
    return [
        at_most(f"{name}, p50", median(times), "µs", SCHEDULER_US),
        Result(f"{name}, p99", quantile(times, 0.99), "µs"),
    ]


def _waste(books: dict[str, Any]) -> list[Result]:
    found = []
    for mix, waste in books["waste"].items():
        owned, used = waste["owned"], waste["owned"] - waste["unused"] - waste["ahead"]
        unused, ahead = 100 * waste["unused"] / owned, 100 * waste["ahead"] / owned
        slabs = 100 * (1 - used / waste["slabs"])
        found += [
            at_most(f"KV memory unused, {mix}", unused, "%", UNUSED_PERCENT),
            Result(f"KV memory taken ahead to grow, {mix}", ahead, "%"),
            Result(f"KV memory unused with slabs of the longest request, {mix}", slabs, "%"),
        ]
    return found


def _sharing(books: dict[str, Any]) -> list[Result]:
    found = []
    for kind, sharing in books["sharing"].items():
        saved = 100 * (1 - sharing["different"] / sharing["named"])
        found.append(Result(f"blocks saved by sharing, {kind}", saved, "%"))
        if sharing["cached_tokens"]:
            cached = 100 * sharing["cached_tokens"] / sharing["input_tokens"]
            found.append(Result(f"prompt tokens found in the cache, {kind}", cached, "%"))
    return found


def _decode_chart(steps: dict[str, Any], args: argparse.Namespace) -> Chart:
    lines = []
    for batch in args.batches:
        points = [(context, s) for b, context, s in steps["decode"] if b == batch]
        if points:
            times = [1000 * seconds for _, seconds in points]
            lines.append(Line(f"batch {batch}", [context for context, _ in points], times))
    return Chart(f"decode, {args.shape}", "context", "ms a step", tuple(lines), log=True)


def _prefill_chart(steps: dict[str, Any], args: argparse.Namespace) -> Chart:
    lines = []
    for chunk in args.chunks:
        points = [(length, s) for c, length, s in steps["prefill"] if c == chunk]
        speeds = [length / seconds for length, seconds in points]
        lines.append(Line(f"chunks of {chunk}", [length for length, _ in points], speeds))
    return Chart(f"prefill, {args.shape}", "prompt tokens", "tokens/s", tuple(lines), log=True)
