"""`baton bench drain`: how long streams pause when their decode worker leaves.

It leaves twice, with equally many streams. When drained, it hands their KV over to the other decode
worker; when killed, their KV is lost, and the other worker, whose cache has nothing of these
prompts, computes it again. A stream's pause is its longest gap between tokens after the signal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import TRANSPORT, engine, option
from baton_loadtest.drive import (
    GrpcLoadClient,
    Ids,
    Sample,
    all_answered,
    answers,
    follow,
    random_prompts,
)
from baton_loadtest.launch import RunningBaton, environment, fleet, say
from baton_loadtest.report import Bars, Report, Result, compared, ms
from batonlm.cli.access import Access
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError

PLOTS = True
OPTIONS = (
    *engine(threads=1),
    TRANSPORT,
    option("--running", 16, "streams"),
    option("--prompt-tokens", 1500),
    option("--output-tokens", 400, "of each"),
)

SETTLED_TOKENS = 8
"""Tokens of every stream before the worker leaves."""

WAIT_S = 300.0
POLL_S = 0.05
WAYS = {"drained": signal.SIGTERM, "killed": signal.SIGKILL}


@dataclass(slots=True)
class Leaving:
    """The results of one way of leaving."""

    tokens: list[list[int]]
    """Of each stream."""
    pauses: list[float]
    """The longest gap of each stream after the signal, in seconds."""
    gaps: list[float]
    """Seconds between tokens before the signal."""
    computed: float
    """Input tokens that the other worker computed after the signal."""
    moved: float
    """Number of sequences whose KV moved."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if a stream's tokens differ from those of an undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        model = engines.with_tokenizer(engines.folder(args.shape), Path(folder))
        drained, killed = asyncio.run(_measure(args, str(model)))
    sides = {"moved": drained, "prefilled again": killed}
    return Report(
        [
            Result("streams on the worker that leaves", args.running, ""),
            Result("prompt tokens of each", args.prompt_tokens, ""),
            Result("between tokens before, p50", ms(drained.gaps, 0.5), "ms"),
            Result("streams whose KV moved", drained.moved, ""),
            Result("input tokens computed again, drained", drained.computed, ""),
            Result("input tokens computed again, killed", killed.computed, ""),
            *(
                compared(
                    f"pause, p{round(100 * share)}, KV moved against prefilled again",
                    ms(drained.pauses, share),
                    "ms",
                    ms(killed.pauses, share),
                )
                for share in (0.5, 0.99)
            ),
        ],
        (
            Bars(
                "pause of a stream",
                "ms",
                tuple(
                    (f"{name}, p{round(100 * share)}", ms(side.pauses, share))
                    for name, side in sides.items()
                    for share in (0.5, 0.99)
                ),
            ),
        ),
    )


async def _measure(args: argparse.Namespace, model: str) -> list[Leaving]:
    # Decode prefills, so that the other worker's cache is the only one.
    options = UpOptions(
        model=model, prefill=0, decode=2, transport=args.transport, threads=args.threads
    )
    # Streams stay together until the worker leaves.
    with environment(BATON_REBALANCE_MOVES=0):
        async with fleet(options) as running:
            sides = []
            for number, (name, how) in enumerate(WAYS.items()):
                prompts = random_prompts(args.seed + number, args.running, args.prompt_tokens)
                say(name)
                sides.append(await _leave(running, how, prompts, args.output_tokens))
                say("undisturbed")
                again = await answers(
                    running.layout.grpc, prompts, args.output_tokens, args.running
                )
                if [sample.ids for sample in again] != sides[-1].tokens:
                    raise BatonError(f"a stream whose worker was {name} gave other tokens")
    return sides


async def _leave(
    running: RunningBaton, how: signal.Signals, prompts: list[Ids], output_tokens: int
) -> Leaving:
    """Fills one decode worker with streams, makes it leave, and reads them to their end."""
    await _until(running, lambda live: live == 2)
    stays, leaves = running.pids("decode").items()
    began = time.perf_counter()
    samples = [Sample(0.0) for _ in prompts]
    client = GrpcLoadClient(Access(running.layout.grpc))
    # While it is frozen, all streams begin on the other one.
    os.kill(stays[1], signal.SIGSTOP)
    following: list[asyncio.Task[Sample]] = []
    try:
        await _until(running, lambda live: live == 1)
        following += [
            asyncio.create_task(follow(client, client.prepare(prompt, output_tokens), began, one))
            for prompt, one in zip(prompts, samples, strict=True)
        ]
        await _until(
            running, lambda _: all(one.tokens >= SETTLED_TOKENS for one in samples), following
        )
        os.kill(stays[1], signal.SIGCONT)
        await _until(running, lambda live: live == 2, following)
        if any(task.done() for task in following):
            raise BatonError("a stream ended before its worker left: ask for more output tokens")
        before = await _counters(running, stays[0])
        signalled = time.perf_counter() - began
        os.kill(leaves[1], how)
        all_answered(list(await asyncio.gather(*following)))
        after = await _counters(running, stays[0])
    finally:
        os.kill(stays[1], signal.SIGCONT)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await client.close()
    pairs = [list(pairwise(sample.events_s)) for sample in samples]
    return Leaving(
        tokens=[sample.ids for sample in samples],
        pauses=[max(b - a for a, b in each if b > signalled) for each in pairs],
        gaps=[b - a for each in pairs for a, b in each if b < signalled],
        computed=after[0] - before[0],
        moved=after[1] - before[1],
    )


async def _until(
    running: RunningBaton,
    reached: Callable[[float], bool],
    following: Sequence[asyncio.Task[Sample]] = (),
) -> None:
    """Waits for a condition on the number of decode workers that the router counts.

    Raises TimeoutError, and BatonError if a stream failed meanwhile.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            all_answered([task.result() for task in following if task.done()])
            metrics = await running.metrics()
            if reached(metrics['baton_workers{role="decode",state="serving"}']):
                return
            await asyncio.sleep(POLL_S)


async def _counters(running: RunningBaton, stays: str) -> tuple[float, float]:
    """Returns the input tokens that the remaining worker has computed, and the moved sequences."""
    computed = (await running.metrics(stays)).get("baton_prefill_tokens_total", 0.0)
    router = await running.metrics()
    return computed, router.get('baton_moves_total{outcome="moved",reason="drain"}', 0.0)
