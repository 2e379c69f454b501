"""`baton bench rebalance`: what moving sequences does when decode grows from two workers to four.

All streams begin on two of four decode workers, because the other two are frozen; then these come
back. With rebalancing, running sequences move to them; without, they get new requests only, and
there are none. Workers are real but for the model: a fake step takes a time that grows with its
tokens, and a pool of blocks that is too small for all streams on two workers. Both sides run the
same streams, and every token must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton_loadtest.bench.options import TRANSPORT, option
from baton_loadtest.drive import GrpcLoadClient, Ids, Sample, all_answered, follow, random_prompts
from baton_loadtest.launch import RunningBaton, environment, fleet, say
from baton_loadtest.report import Bars, Report, Result, compared, ms
from batonlm.cli.access import Access
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError
from batonlm.core.routing.rebalance import RebalancePolicy

PLOTS = True
OPTIONS = (
    TRANSPORT,
    option("--running", 32, "streams"),
    option("--prompt-tokens", 200),
    option("--output-tokens", 1500, "of each"),
    option("--step-ms", 10.0, "of a step"),
    option("--token-ms", 0.5, "more of it, for each token"),
    option("--blocks", 1200, "of 16 positions, that a decode worker has for KV"),
    option("--moves", RebalancePolicy().moves_per_minute, "a minute, with rebalancing"),
)

SETTLED_TOKENS = 8
"""Tokens of every stream before the other workers come back."""

BEFORE, AFTER = 2, 4
"""Decode workers."""

WAIT_S = 300.0
POLL_S = 0.05


@dataclass(slots=True)
class Side:
    """The results with a budget of moves, or with none."""

    tokens: list[list[int]]
    """Of each stream."""
    gaps: list[float]
    """Seconds between tokens, from when all workers are there."""
    pauses: list[float]
    """The longest of each stream."""
    preemptions: float
    moved: float
    """Number of sequences whose KV moved."""
    even_s: float | None
    """Seconds until no two workers differed by more than one sequence; None: they always did, while
    all streams ran."""
    spread: float
    """Most sequences less fewest, when the first stream ended."""
    took_s: float
    """From when all workers were there until the last stream ended."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if tokens differ between the sides."""
    sides = {}
    for name, moves in (("without", 0), ("with", args.moves)):
        say(f"{name} rebalancing")
        with environment(
            BATON_FAKE_STEP_MS=args.step_ms,
            BATON_FAKE_TOKEN_MS=args.token_ms,
            BATON_TEST_CONSTANTS=f"__main__.FAKE_BLOCKS={args.blocks}",
            BATON_REBALANCE_MOVES=moves,
        ):
            sides[name] = asyncio.run(_side(args))
    without, moving = sides["without"], sides["with"]
    if without.tokens != moving.tokens:
        raise BatonError("a stream that moved gave other tokens")
    even = [] if moving.even_s is None else [Result("time until even, with", moving.even_s, "s")]
    return Report(
        [
            Result("streams", args.running, ""),
            Result("sequences that moved", moving.moved, ""),
            *even,
            Result("most sequences less fewest, with", moving.spread, "", without.spread),
            *(
                compared(
                    f"between tokens, p{share:g}, with against without",
                    ms(moving.gaps, share / 100),
                    "ms",
                    ms(without.gaps, share / 100),
                )
                for share in (50, 99, 99.9)
            ),
            compared(
                "longest pause of a stream, p50, with against without",
                ms(moving.pauses, 0.5),
                "ms",
                ms(without.pauses, 0.5),
            ),
            Result("preemptions, with", moving.preemptions, "", without.preemptions),
            compared("time until all ended", moving.took_s, "s", without.took_s),
        ],
        (
            Bars(
                "between tokens",
                "ms",
                tuple(
                    (f"{name}, p{share:g}", ms(side.gaps, share / 100))
                    for name, side in sides.items()
                    for share in (50, 99)
                ),
            ),
        ),
    )


async def _side(args: argparse.Namespace) -> Side:
    # Decode prefills, so that nothing else competes for the cores.
    options = UpOptions(runner="fake", prefill=0, decode=AFTER, transport=args.transport)
    async with fleet(options) as running:
        await _serving(running, AFTER)
        prompts = random_prompts(args.seed, args.running, args.prompt_tokens)
        return await _grow(running, prompts, args.output_tokens)


async def _grow(running: RunningBaton, prompts: list[Ids], output_tokens: int) -> Side:
    """Begins all streams on BEFORE workers, lets the others come, and reads all to their end."""
    frozen = list(running.pids("decode").values())[BEFORE:]
    began = time.perf_counter()
    samples = [Sample(0.0) for _ in prompts]
    client = GrpcLoadClient(Access(running.layout.grpc))
    following: list[asyncio.Task[Sample]] = []
    try:
        _signal(frozen, signal.SIGSTOP)
        await _serving(running, BEFORE)
        following += [
            asyncio.create_task(follow(client, client.prepare(prompt, output_tokens), began, one))
            for prompt, one in zip(prompts, samples, strict=True)
        ]
        async with asyncio.timeout(WAIT_S):
            while any(one.tokens < SETTLED_TOKENS for one in samples):
                all_answered([task.result() for task in following if task.done()])
                await asyncio.sleep(POLL_S)
        _signal(frozen, signal.SIGCONT)
        await _serving(running, AFTER)
        grown = time.perf_counter() - began
        even_s, spread = None, 0.0
        while not any(task.done() for task in following):
            counts = await _sequences(running)
            spread = max(counts) - min(counts)
            if spread <= 1 and even_s is None:
                even_s = time.perf_counter() - began - grown
            await asyncio.sleep(POLL_S)
        all_answered(list(await asyncio.gather(*following)))
        took_s = time.perf_counter() - began - grown
        preemptions = [
            _total(await running.metrics(name), "baton_preemptions_total")
            for name in running.pids("decode")
        ]
        moved = (await running.metrics()).get(
            'baton_moves_total{outcome="moved",reason="load"}', 0.0
        )
    finally:
        _signal(frozen, signal.SIGCONT)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await client.close()
    gaps = [[b - a for a, b in pairwise(one.events_s) if b > grown] for one in samples]
    return Side(
        tokens=[sample.ids for sample in samples],
        gaps=[gap for each in gaps for gap in each],
        pauses=[max(each) for each in gaps],
        preemptions=sum(preemptions),
        moved=moved,
        even_s=even_s,
        spread=spread,
        took_s=took_s,
    )


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


async def _serving(running: RunningBaton, workers: int) -> None:
    """Waits until the router counts so many decode workers. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while True:
            metrics = await running.metrics()
            if metrics['baton_workers{role="decode",state="serving"}'] == workers:
                return
            await asyncio.sleep(POLL_S)


async def _sequences(running: RunningBaton) -> list[float]:
    """Returns how many each decode worker has."""
    found = await asyncio.gather(*(running.metrics(name) for name in running.pids("decode")))
    return [_total(metrics, "baton_sequences") for metrics in found]


def _total(metrics: dict[str, float], name: str) -> float:
    """Returns the sum of a metric's samples."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)
