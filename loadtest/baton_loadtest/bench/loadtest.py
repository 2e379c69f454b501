"""`baton bench loadtest`: the load generator's own accuracy, and the rate at which it keeps its
schedule.

A server of drawn latencies records what they really were, from a request's arrival to each token's
write. Percentiles that the load generator tells, which count from when a request was due, are set
against the same percentiles of those records: the difference is the load generator's own doing, and
what lies between the two processes. Each is on a core of its own where there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import Sequence

from baton.cli.access import Access
from baton.core.errors import BatonError
from baton.rpc.loop import Loop
from baton_loadtest.bench.known import known
from baton_loadtest.bench.known_server import Latencies, Record
from baton_loadtest.bench.process import say
from baton_loadtest.drive import HttpLoadClient, LoadLimits, OpenLoop, TokenIds
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from baton_loadtest.load.summary import Objectives, Summary
from baton_loadtest.report import Report, Result, at_most, quantile

PROMPT_TOKENS = 64
WARM_S = 2.0
SHARES = (0.5, 0.9, 0.99)
RIGHT = 1.0
"""Percent that a percentile may be off, where the schedule was kept."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when an answer is missing."""
    results: list[Result] = []
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for rate in args.rates:
        with known(Latencies(seed=args.seed)) as server:
            _apart(cores, server.pid)
            _run(args, server.address, rate, WARM_S)
            server.records()
            say(f"{rate} requests/s for {args.seconds:g} s")
            summary = _run(args, server.address, rate, args.seconds)
            records = server.records()
        if not summary.answered == len(records) == summary.due:
            raise BatonError(
                f"{summary.due} requests were due, {summary.answered} answered, and "
                f"{len(records)} recorded by the server"
            )
        results += _figures(rate, summary, records)
    return Report(results)


def _run(args: argparse.Namespace, address: str, rate: int, seconds: float) -> Summary:
    source = Drawn(Arrivals(Kind.POISSON, rate, seconds), fixed(PROMPT_TOKENS, args.output_tokens))

    async def main() -> Summary:
        client = HttpLoadClient(Access(address), "")
        try:
            runner = OpenLoop(client, TokenIds(args.seed, 64, 1899), LoadLimits())
            return Summary(await runner.run(source.workload(args.seed)), Objectives())
        finally:
            await client.close()

    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main())
    finally:
        gc.unfreeze()


def _figures(rate: int, summary: Summary, records: Sequence[Record]) -> list[Result]:
    told = summary.latencies
    pairs = (
        ("first token", told.first, [record.first_s for record in records]),
        ("between tokens", told.between, [gap for one in records for gap in one.gaps_s]),
        ("end to end", told.whole, [record.whole_s for record in records]),
    )
    found = [
        Result(f"{rate}/s: requests", summary.due, ""),
        Result(f"{rate}/s: open at a time, at most", summary.run.most_open, ""),
        at_most(
            f"{rate}/s: left late, p99", 1000 * summary.lag_s, "ms", 1000 * summary.objectives.lag_s
        ),
        Result(f"{rate}/s: the schedule was kept, it says", int(summary.kept), ""),
    ]
    off = 0.0
    for name, ours, theirs in pairs:
        for share in SHARES:
            said, was = quantile(ours, share), quantile(theirs, share)
            off = max(off, abs(said / was - 1))
            found.append(
                Result(
                    f"{rate}/s: {name}, p{100 * share:g}, told against recorded",
                    1000 * said, "ms", 1000 * was, said / was,
                )
            )  # fmt: skip
    name = f"{rate}/s: a percentile is off by, at most"
    return [*found, at_most(name, 100 * off, "%", RIGHT)]


def _apart(cores: Sequence[int], pid: int) -> None:
    """The server on one core, this process on another."""
    if len(cores) > 1:
        os.sched_setaffinity(pid, {cores[1]})
        os.sched_setaffinity(0, {cores[0]})
