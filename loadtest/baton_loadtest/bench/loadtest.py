"""`baton bench loadtest`: the load generator's accuracy, and the rate up to which it keeps its
schedule.

A server with random latencies records them, from a request's arrival to each token's write. The
load generator's percentiles, which count from when a request was due, are compared with those of
the records. The difference is due to the load generator and to the path between the processes. Each
has its own core if there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import Sequence

from baton_loadtest.bench.known_server import KnownAnswer, Latencies, known
from baton_loadtest.bench.options import option
from baton_loadtest.drive import ORDINARY, HttpLoadClient, OpenLoop, TokenIds
from baton_loadtest.launch import cores, say
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from baton_loadtest.load.summary import Objectives, Summary
from baton_loadtest.report import Report, Result, at_most, compared, ms
from batonlm.cli.access import Access
from batonlm.core.errors import BatonError
from batonlm.rpc.loop import Loop

PLOTS = False
OPTIONS = (
    option("--rates", (200, 2000), "requests a second"),
    option("--seconds", 20.0, "of each rate"),
    option("--output-tokens", 8),
)

PROMPT_TOKENS = 64
WARM_S = 2.0
SHARES = (0.5, 0.9, 0.99)
RIGHT = 1.0
"""Maximum error of a percentile, in percent, if the schedule was kept."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if an answer is missing."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return Report([one for rate in args.rates for one in runner.run(_measure(args, rate))])


async def _measure(args: argparse.Namespace, rate: int) -> list[Result]:
    allowed = cores()
    async with known(Latencies(seed=args.seed), allowed[-1]) as server:
        if len(allowed) > 1:
            os.sched_setaffinity(0, {allowed[0]})
        try:
            await _run(args, server.address, rate, WARM_S)
            await server.records()
            say(f"{rate} requests/s for {args.seconds:g} s")
            summary = await _run(args, server.address, rate, args.seconds)
            records = await server.records()
        finally:
            if len(allowed) > 1:
                os.sched_setaffinity(0, allowed)
    if not summary.answered == len(records) == summary.due:
        raise BatonError(
            f"{summary.due} requests were due, {summary.answered} answered, and "
            f"{len(records)} recorded by the server"
        )
    return _figures(rate, summary, records)


async def _run(args: argparse.Namespace, address: str, rate: int, seconds: float) -> Summary:
    source = Drawn(Arrivals(Kind.POISSON, rate, seconds), fixed(PROMPT_TOKENS, args.output_tokens))
    gc.collect()
    gc.freeze()
    try:
        async with HttpLoadClient(Access(address)) as client:
            loop = OpenLoop(client, TokenIds(args.seed, *ORDINARY))
            return Summary(await loop.run(source.workload(args.seed)), Objectives())
    finally:
        gc.unfreeze()


def _figures(rate: int, summary: Summary, records: Sequence[KnownAnswer]) -> list[Result]:
    ours, lag_goal = summary.latencies, 1000 * summary.objectives.lag_s
    pairs = (
        ("first token", ours.first, [record.first_s for record in records]),
        ("between tokens", ours.between, [gap for one in records for gap in one.gaps_s]),
        ("end to end", ours.whole, [record.whole_s for record in records]),
    )
    found = [
        Result(f"{rate}/s: requests", summary.due, ""),
        Result(f"{rate}/s: open at a time, at most", summary.run.most_open, ""),
        at_most(f"{rate}/s: left late, p99", 1000 * summary.lag_s, "ms", lag_goal),
        Result(f"{rate}/s: the schedule was kept, it says", int(summary.kept), ""),
    ]
    off = 0.0
    for name, reported, recorded in pairs:
        for share in SHARES:
            one, other = ms(reported, share), ms(recorded, share)
            off = max(off, abs(one / other - 1))
            figure = f"{rate}/s: {name}, p{100 * share:g}, told against recorded"
            found.append(compared(figure, one, "ms", other))
    name = f"{rate}/s: a percentile is off by, at most"
    return [*found, at_most(name, 100 * off, "%", RIGHT)]
