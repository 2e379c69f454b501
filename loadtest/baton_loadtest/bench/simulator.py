"""`baton bench simulator`: the CPU time of simulating traffic, with made-up worker speeds.

First a part of the trace is simulated with and without skipping quiet steps; then the whole run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton_loadtest import traces
from baton_loadtest.bench.options import option
from baton_loadtest.launch import say
from baton_loadtest.report import Report, Result, at_most, compared
from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.settings import FleetFacts, RouterFacts, WorkerFacts
from baton_loadtest.simulator.simulation import Outcome, simulate
from baton_loadtest.simulator.traffic import Scale, traced_requests
from baton_loadtest.traces import BLOCK, Recorded
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import WorkerSpeed

PLOTS = False
OPTIONS = (
    option("--trace", None, "Mooncake's conversation trace", type=Path, required=True),
    option("--workers", 8),
    option("--copies", 1, "of the trace side by side"),
    option("--seconds", 0.0, "of the trace (default: all)"),
    option("--block-size", 64, "positions"),
)

SPEED = WorkerSpeed(
    step_s=0.012,
    row_s=1e-4,
    context_s=2.5e-8,
    prefill_step_s=0.005,
    prefill_position_s=3e-5,
    prefill_read_s=6e-10,
    link_bytes_per_s=2e10,
    handover_s=0.002,
)
KV_BYTES = 131072
POSITIONS = 512_000
"""KV capacity of a prefill worker; a decode worker has twice as much."""

COMPARED_S = 300.0
GOAL_S = 300.0
"""For an hour of the trace on 8 workers."""


def measure(args: argparse.Namespace) -> Report:
    if args.workers < 2:
        raise InvalidArgument("must be at least 2", field="workers")
    if BLOCK % args.block_size:
        raise InvalidArgument(f"must divide {BLOCK}", field="block_size")
    trace = traces.read(args.trace).requests
    results = _skipping(trace, min(COMPARED_S, args.seconds or COMPARED_S))
    traffic = traced_requests(trace, Scale(copies=args.copies, seconds=args.seconds))
    say(f"{args.workers} workers, {len(traffic)} requests")
    cpu_s, outcome = _run(_fleet(args.workers, args.block_size), traffic)
    answered = [record for record in outcome.records if record.ended is not None]
    steps = sum(use.steps for use in (*outcome.prefills, *outcome.decodes))
    name = f"{args.workers:,} workers: CPU time"
    whole = (args.workers, args.copies, args.seconds) == (8, 1, 0.0)
    return Report(
        [
            *results,
            at_most(name, cpu_s, "s", GOAL_S) if whole else Result(name, cpu_s, "s"),
            Result("traffic", max(request.arrival for request in traffic), "s"),
            Result("simulated time", outcome.end, "s"),
            Result("requests", len(outcome.records), ""),
            Result("answered", len(answered), ""),
            Result("prompt tokens", sum(record.request.input_tokens for record in answered), ""),
            Result("output tokens", sum(record.tokens for record in answered), ""),
            Result("steps", steps, ""),
            Result("events", outcome.events, ""),
            Result("routing decisions", outcome.decisions, ""),
        ]
    )


def _skipping(trace: Sequence[Recorded], seconds: float) -> list[Result]:
    """Runs the same traffic with and without skipping."""
    traffic = traced_requests(trace, Scale(seconds=seconds))
    facts = _fleet(8, 64)
    say(f"skipping and stepping, {len(traffic)} requests")
    stepping_s, stepped = _run(replace(facts, skip=False), traffic)
    skipping_s, skipped = _run(facts, traffic)
    unlike = sum(
        one.decode != other.decode
        or one.tokens != other.tokens
        or abs((one.ended or 0.0) - (other.ended or 0.0)) > 1e-6
        for one, other in zip(stepped.records, skipped.records, strict=True)
    )
    return [
        compared(f"{seconds:g} s, skipping: events", skipped.events, "", stepped.events),
        compared(f"{seconds:g} s, skipping: CPU time", skipping_s, "s", stepping_s),
        at_most("requests that skipping changed", unlike, "", 0),
    ]


def _run(facts: FleetFacts, traffic: Sequence[Request]) -> tuple[float, Outcome]:
    began = time.process_time()
    outcome = simulate(facts, traffic)
    return time.process_time() - began, outcome


def _fleet(workers: int, block_size: int) -> FleetFacts:
    """A quarter of the workers prefill; there is a router for every eight."""
    prefills = max(1, workers // 4)
    prefill = WorkerFacts(SPEED, POSITIONS // block_size, block_size, 8192)
    decode = WorkerFacts(SPEED, 2 * POSITIONS // block_size, block_size, 2048, 256)
    return FleetFacts(
        prefill,
        decode,
        prefills,
        workers - prefills,
        KV_BYTES,
        router=RouterFacts(routers=max(1, workers // 8)),
    )
