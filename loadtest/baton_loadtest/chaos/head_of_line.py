"""`baton chaos kv head-of-line`: one decode worker is frozen or full; others' requests continue.

One prefill worker hands over to three decode workers, each behind its own router, so that each
request's worker is known. Requests to the first worker are counted. The second one is disturbed
while requests are sent to it. Rounds with the same load on the third, undisturbed one alternate
with these, so that the rounds differ in the disturbance and not in the work.
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

from baton_loadtest.chaos.cluster import Cluster, call, cluster, read
from baton_loadtest.launch import say
from baton_loadtest.report import Result, compared
from batonlm.cli.layout import APART, UpOptions
from batonlm.rpc.channels import open_channel
from batonlm.v1 import inference_pb2_grpc

RATE = 10.0
"""Requests per second besides the counted ones, in an open loop: an unanswered one delays none."""

CONCURRENCY = 4
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 16
LONG_PROMPT, LONG_OUTPUT, LONG_ONES = 1900, 140, 3
"""Two of these fill the small pool of the disturbed worker, and a third one waits for room."""

COUNTED, TROUBLED, SOUND = 0, 1, 2
SMALL_POOL = ("--block-size", "1")

ROUNDS = {
    "well": (SOUND, 0),
    "frozen": (TROUBLED, 0),
    "busy": (SOUND, LONG_ONES),
    "full": (TROUBLED, LONG_ONES),
}
"""Which worker gets the additional load, and its number of long requests."""

Stubs = Sequence[inference_pb2_grpc.InferenceStub]


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs alternating rounds and compares their medians."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    rates: dict[str, list[float]] = {name: [] for name in ROUNDS}
    draw = random.Random(args.seed)
    options = UpOptions(decode=3, routers=3, transport=args.transport, local_prefill_tokens=APART)
    routed, flags = {i: i for i in range(3)}, {f"decode-{TROUBLED}": SMALL_POOL}
    async with cluster(options, routed=routed, flags=flags) as running:
        channels = [open_channel(router.spec.grpc) for router in running.children_of("router")]
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        try:
            await _round("well", running, stubs, draw, args.seconds / 2)
            for _ in range(args.rounds):
                for name, found in rates.items():
                    found.append(await _round(name, running, stubs, draw, args.seconds))
                    say(f"{name}: {found[-1]:.1f} requests/s")
        finally:
            for channel in channels:
                await channel.close()
    return [
        Result("rounds of each kind", args.rounds, ""),
        *(
            compared(
                f"requests while another worker is {trouble}, against {sound}",
                median(rates[trouble]),
                "/s",
                median(rates[sound]),
                0.9,
            )
            for trouble, sound in (("frozen", "well"), ("full", "busy"))
        ),
    ]


async def _round(
    name: str, running: Cluster, stubs: Stubs, draw: random.Random, seconds: float
) -> float:
    """Returns the counted requests per second that were answered."""
    beside, num_long = ROUNDS[name]
    done, ends = 0, time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < ends:
            answered = await read(call(stubs[COUNTED], draw, PROMPT_TOKENS, OUTPUT_TOKENS))
            done += answered and time.perf_counter() < ends

    async with (
        _frozen(running, stubs, draw, name == "frozen"),
        _load(stubs[beside], draw, num_long),
    ):
        await asyncio.gather(*(ask() for _ in range(CONCURRENCY)))
    return done / seconds


@asynccontextmanager
async def _frozen(
    running: Cluster, stubs: Stubs, draw: random.Random, frozen: bool
) -> AsyncIterator[None]:
    if not frozen:
        yield
        return
    victim = running.child(f"decode-{TROUBLED}").pid
    os.kill(victim, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(victim, signal.SIGCONT)
        # Until its router uses it again.
        await read(call(stubs[TROUBLED], draw, PROMPT_TOKENS, OUTPUT_TOKENS))


@asynccontextmanager
async def _load(
    stub: inference_pb2_grpc.InferenceStub, draw: random.Random, num_long: int
) -> AsyncIterator[None]:
    """Sends short requests at a rate, and keeps long ones open, within the block; none is open
    after it."""
    open_calls: set[asyncio.Task[bool]] = set()

    async def short() -> None:
        while True:
            asked = asyncio.create_task(read(call(stub, draw, PROMPT_TOKENS, OUTPUT_TOKENS)))
            open_calls.add(asked)
            asked.add_done_callback(open_calls.discard)
            await asyncio.sleep(draw.expovariate(RATE))

    async def long() -> None:
        while True:
            if not await read(call(stub, draw, LONG_PROMPT, LONG_OUTPUT)):
                await asyncio.sleep(0.1)

    loops = [asyncio.create_task(short()), *(asyncio.create_task(long()) for _ in range(num_long))]
    try:
        yield
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for asked in list(open_calls):
            asked.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
