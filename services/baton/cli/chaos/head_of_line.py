"""`baton chaos kv head-of-line`: one decode worker is frozen or full; another's requests go on.

One prefill worker gives to two decode workers, each behind a router of its own, so that it is
settled who asks for which. Rounds alternate: both well; then the first one in trouble, with the
same requests sent to it all the while. The second one's requests are counted in both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median

import grpc

from baton.cli.bench.process import say
from baton.cli.chaos.calls import call, read
from baton.cli.chaos.cluster import Cluster, cluster
from baton.cli.layout import UpOptions
from baton.cli.results import Result, compared
from baton.v1 import inference_pb2_grpc

RATE = 10.0
"""Requests a second to the worker in trouble: open loop, for an unanswered one stops nobody."""

CONCURRENCY = 4
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 16
LONG_TOKENS = 1500
TROUBLED, WELL = 0, 1


def measure(args: argparse.Namespace) -> list[Result]:
    """Alternating rounds; medians are compared."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    rates: dict[str, list[float]] = {"well": [], "frozen": [], "full": []}
    draw = random.Random(args.seed)
    options = UpOptions(decode=2, routers=2, transport=args.transport)
    # So few positions that a handful of long sequences keep everybody else out.
    small = {f"decode-{TROUBLED}": ("--block-size", "1")}
    async with cluster(options, routed={0: TROUBLED, 1: WELL}, flags=small) as running:
        first, second = running.children_of("router")
        async with (
            grpc.aio.insecure_channel(first.spec.grpc) as troubled,
            grpc.aio.insecure_channel(second.spec.grpc) as well,
        ):
            stubs: Sequence[inference_pb2_grpc.InferenceStub] = [
                inference_pb2_grpc.InferenceStub(c) for c in (troubled, well)
            ]
            await _round(stubs, draw, args.seconds / 2)
            for _ in range(args.rounds):
                for trouble in rates:
                    async with _in_trouble(trouble, running, stubs[TROUBLED], draw):
                        rates[trouble].append(await _round(stubs, draw, args.seconds))
                        say(f"{trouble}: {rates[trouble][-1]:.1f} requests/s")
    quiet = median(rates["well"])
    return [
        Result("rounds of each kind", args.rounds, ""),
        *(
            compared(
                f"requests while the other one is {trouble}",
                median(rates[trouble]),
                "/s",
                quiet,
                0.9,
            )
            for trouble in ("frozen", "full")
        ),
    ]


@asynccontextmanager
async def _in_trouble(
    trouble: str, running: Cluster, stub: inference_pb2_grpc.InferenceStub, draw: random.Random
) -> AsyncIterator[None]:
    victim = running.child(f"decode-{TROUBLED}").pid
    long: list[asyncio.Task[None]] = []
    if trouble == "frozen":
        os.kill(victim, signal.SIGSTOP)
    elif trouble == "full":
        long = [asyncio.create_task(_fill(stub, draw)) for _ in range(8)]
        await asyncio.sleep(0.5)
    try:
        yield
    finally:
        os.kill(victim, signal.SIGCONT)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        # Until the first router has found it well again.
        await read(call(stub, draw, PROMPT_TOKENS, OUTPUT_TOKENS))


async def _fill(stub: inference_pb2_grpc.InferenceStub, draw: random.Random) -> None:
    """Keeps a long sequence running until cancelled."""
    while True:
        stream = call(stub, draw, PROMPT_TOKENS, LONG_TOKENS)
        try:
            async for _ in stream:
                pass
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)


async def _round(
    stubs: Sequence[inference_pb2_grpc.InferenceStub], draw: random.Random, seconds: float
) -> float:
    """Requests a second that the second worker finished."""
    done, open_calls = 0, set[asyncio.Task[bool]]()
    ends = time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await read(call(stubs[WELL], draw, PROMPT_TOKENS, OUTPUT_TOKENS))
            done += time.perf_counter() < ends

    async def trouble() -> None:
        while time.perf_counter() < ends:
            asked = read(call(stubs[TROUBLED], draw, PROMPT_TOKENS, OUTPUT_TOKENS))
            open_calls.add(asyncio.create_task(asked))
            await asyncio.sleep(draw.expovariate(RATE))

    await asyncio.gather(trouble(), *(ask() for _ in range(CONCURRENCY)))
    for task in open_calls:
        task.cancel()
    await asyncio.gather(*open_calls, return_exceptions=True)
    return done / seconds
