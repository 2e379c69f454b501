"""`baton chaos hang`: a worker of each role is stopped for 1, 5 and 60 s under load, then resumed.

A stop of a second has no consequences. In a longer one its requests continue on other workers
within three seconds, and after it the worker's late messages are ignored: every stream has the
tokens of an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from baton_loadtest.chaos.cluster import Cluster, call, cluster
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, compared
from batonlm.cli.http_client import total
from batonlm.cli.layout import APART, UpOptions
from batonlm.cli.supervisor import ChildProcess
from batonlm.rpc.channels import open_channel
from batonlm.v1 import inference_pb2_grpc

ROLES = ("tokenizer", "prefill", "decode", "detokenizer")
SHORT_S = 1.0
STREAMS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 600
LEAD_S = 1.0
"""Load before the stop, so that every stream has begun."""
AFTER_S = 3.0
"""Load after the end of the stop, when the resumed worker sends late messages."""
MOVED = ("baton_migrations_total", "baton_retries_total")


@dataclass(slots=True)
class Round:
    """The streams that ran during one stop."""

    streams: int = 0
    exact: int = 0
    stall_s: float = 0.0
    """The longest pause of any stream, including before its first token."""
    moved: float = 0.0
    """Attempts that continued on other workers."""


@dataclass(slots=True)
class _Stream:
    """One stream."""

    seed: int
    """Of its prompt."""
    times: list[float] = field(default_factory=list)
    """When the request was sent, and when parts of the answer arrived."""
    token_ids: list[int] = field(default_factory=list)
    failed: bool = False

    def stall_s(self, since: float, until: float) -> float:
        """Returns the longest pause that overlaps a period."""
        gaps = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in gaps if b > since and a < until), default=0.0)


def measure(args: argparse.Namespace) -> list[Result]:
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    options = UpOptions(
        tokenizer=2,
        prefill=2,
        decode=2,
        detokenizer=2,
        transport=args.transport,
        local_prefill_tokens=APART,
    )
    async with (
        cluster(options) as running,
        open_channel(running.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        seeds = [args.seed * 1000 + number for number in range(STREAMS)]
        expected = {seed: (await _read(stub, seed)).token_ids for seed in seeds}
        found: list[Result] = []
        for seconds in args.seconds:
            for role in ROLES:
                victim = running.children_of(role)[0]
                met = await _round(running, stub, expected, victim, seconds)
                found += _results(role, seconds, met)
                say(f"{role} stopped for {seconds:g} s: {met}")
    return found


def _results(role: str, seconds: float, met: Round) -> list[Result]:
    name = f"{role} stopped for {seconds:g} s"
    exact = compared(f"{name}: streams as undisturbed", met.exact, "", met.streams, 1.0)
    if seconds <= SHORT_S:
        return [exact, at_most(f"{name}: attempts moved", met.moved, "", 0)]
    return [
        exact,
        Result(f"{name}: attempts moved", met.moved, ""),
        at_most(f"{name}: longest silence of a stream", met.stall_s, "s", 3.0),
    ]


async def _round(
    running: Cluster,
    stub: inference_pb2_grpc.InferenceStub,
    expected: dict[int, list[int]],
    victim: ChildProcess,
    seconds: float,
) -> Round:
    met, streams, going = Round(), list[_Stream](), True

    async def load(seed: int) -> None:
        while going:
            streams.append(await _read(stub, seed))

    before = await _moved(running)
    loads = [asyncio.create_task(load(seed)) for seed in expected]
    await asyncio.sleep(LEAD_S)
    stopped = time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    resumed = time.monotonic()
    await asyncio.sleep(AFTER_S)
    going = False
    await asyncio.gather(*loads)
    met.moved = await _moved(running) - before
    met.streams = len(streams)
    met.exact = sum(not s.failed and s.token_ids == expected[s.seed] for s in streams)
    met.stall_s = max(stream.stall_s(stopped, resumed) for stream in streams)
    return met


async def _read(stub: inference_pb2_grpc.InferenceStub, seed: int) -> _Stream:
    stream = _Stream(seed, [time.monotonic()])
    asked = call(stub, random.Random(seed), PROMPT_TOKENS, OUTPUT_TOKENS)
    try:
        async for response in asked:
            ids: Sequence[int] = response.event.delta.token_ids
            if ids:
                stream.times.append(time.monotonic())
                stream.token_ids.extend(ids)
    except grpc.aio.AioRpcError:
        stream.failed = True
    return stream


async def _moved(running: Cluster) -> float:
    (router,) = running.children_of("router")
    found = await asyncio.to_thread(running.metrics, router.spec)
    return sum(total(found, name) for name in MOVED)
