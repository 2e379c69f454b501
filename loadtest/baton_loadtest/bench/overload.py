"""`baton bench overload`: goodput, refusals and memory at up to ten times what the fleet can do.

Capacity is found first, by a closed load. Then requests arrive by an open loop, whatever becomes of
them; goodput is what is answered within its objectives. Last a retry storm: at twice capacity every
client that is refused asks again at once, five times; then arrivals fall to 0.7 of capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from baton.cli.layout import UpOptions
from baton.cli.ports import free_ports
from baton.core.errors import BatonError
from baton_loadtest.bench.arrivals import (
    AT_ONCE,
    ENGINE_CORE,
    MIB,
    OTHER_CORE,
    Arrivals,
    Phase,
    stream,
)
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.report import Report, Result, at_most, compared

STORM, AFTER = 2.0, 0.7
GOODPUT, REFUSAL_MS, FIRST_TOKEN, FLAT, BACK_S = 0.9, 50.0, 2.0, 1.1, 10.0
ENOUGH = 0.9
"""Of a second's arrivals that are answered within their objectives: goodput is back."""

BINS_IN_A_ROW = 3


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when the fleet answers nothing."""
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    http_port, grpc_port = free_ports(2)
    options = UpOptions(
        model=args.model,
        transport=args.transport,
        threads=1,
        http_port=http_port,
        grpc_port=grpc_port,
        engine_cpus=ENGINE_CORE,
        other_cpus=OTHER_CORE,
        router_flags=("--max-queue-s", str(args.queue_s)),
    )
    async with fleet(options) as (layout, supervisor):
        load = Arrivals(args, layout, supervisor)
        capacity = await load.capacity()
        if not capacity:
            raise BatonError("nothing was answered while capacity was looked for")
        phases = await load.run(
            [
                {"name": f"{factor:g}x", "seconds": args.seconds,
                 "streams": [stream(factor * capacity)]}
                for factor in args.factors
            ]
        )  # fmt: skip
        storm = await load.run(
            [
                {"name": "storm", "seconds": args.seconds, "retry": True,
                 "streams": [stream(STORM * capacity)]},
                {"name": "after", "seconds": 2 * BACK_S, "streams": [stream(AFTER * capacity)]},
            ]
        )  # fmt: skip
    return _figures(args, capacity, phases, storm)


def _figures(
    args: argparse.Namespace, capacity: float, phases: list[Phase], storm: list[Phase]
) -> list[Result]:
    found = [
        Result(f"capacity, {AT_ONCE} requests at a time", capacity, "requests/s"),
        Result("prompt tokens", args.prompt_tokens, ""),
        Result("output tokens", args.output_tokens, ""),
        Result("longest foretold wait that is let in", 1000 * args.queue_s, "ms"),
        Result("objective, first token", 1000 * args.first_s, "ms"),
        Result("objective, between tokens", 1000 * args.between_s, "ms"),
    ]
    peak = max(phase.goodput(args) for phase in phases)
    if not peak:
        raise BatonError("no request was answered within its objectives")
    worst, plain = phases[-1], min(phases, key=lambda phase: abs(_factor(phase) - 1))
    for phase in phases:
        goal = GOODPUT if phase is worst else None
        name = f"goodput at {phase.name} against the peak"
        found.append(compared(name, phase.goodput(args), "requests/s", peak, goal))
    for phase in phases:
        found += [
            Result(f"refused at {phase.name}", _refused(phase), "%"),
            Result(f"first token at {phase.name}, p50", 1000 * phase.first_token(0.5), "ms"),
            Result(f"the router's CPU at {phase.name}", phase.cores("router"), "cores"),
        ]
    found += [
        at_most(
            f"first token at {worst.name} against {plain.name}, p99",
            1000 * worst.first_token(0.99), "ms", FIRST_TOKEN, 1000 * plain.first_token(0.99),
        ),
        at_most(f"refusals at {worst.name}, p99", 1000 * worst.refusal(0.99), "ms", REFUSAL_MS),
        Result(f"Retry-After at {worst.name}, p50", worst.retry_after(0.5), "s"),
        Result("failed otherwise", sum(phase.failed() for phase in (*phases, *storm)), ""),
    ]  # fmt: skip
    for name, size in worst.rss.items():
        known = plain.rss.get(name, size)
        text = f"memory of {name} at {worst.name} against {plain.name}"
        found.append(at_most(text, size / MIB, "MiB", FLAT, known / MIB))
    lag = max(phase.lag(0.99) for phase in (*phases, *storm))
    found.append(Result("the load's own lag, p99 of the worst phase", 1000 * lag, "ms"))
    name = "seconds until goodput is back after a retry storm"
    found.append(at_most(name, _back(args, storm[1]), "s", BACK_S))
    return found


def _factor(phase: Phase) -> float:
    return float(phase.name.removesuffix("x"))


def _refused(phase: Phase) -> float:
    return 100 * sum(one.status == 429 for one in phase.asked) / max(1, len(phase.asked))


def _back(args: argparse.Namespace, after: Phase) -> float:
    """Seconds until nearly all that arrive are answered within their objectives, and stay so."""
    bins: list[list[bool]] = [[] for _ in range(int(after.seconds))]
    for one in after.asked:
        if int(one.at) < len(bins):
            bins[int(one.at)].append(one.meets(args.first_s, args.between_s))
    good = [not each or sum(each) >= ENOUGH * len(each) for each in bins]
    for second in range(len(good) - BINS_IN_A_ROW + 1):
        if all(good[second : second + BINS_IN_A_ROW]):
            return float(second)
    return after.seconds
