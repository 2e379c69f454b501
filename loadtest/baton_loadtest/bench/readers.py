"""`baton bench readers`: what readers that stall and senders that crawl cost everybody else.

The same streams are followed alone and beside a crowd (`crowd`), in turns. A step takes a fixed
time, so that nothing but the router's own work can stretch the time between two tokens. The crowd's
own answers are made before its turn is measured: what is measured is that nobody reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from baton.cli.http_client import scrape
from baton.cli.layout import Layout, UpOptions
from baton.cli.ports import free_ports
from baton.core.errors import BatonError
from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2_grpc
from baton_loadtest.bench.drain import Stream
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.bench.load import REQUEST_TIMEOUT_S, Load
from baton_loadtest.bench.process import say
from baton_loadtest.drive import greedy
from baton_loadtest.report import Report, Result, at_most, compared, quantile

GOAL = 1.2
WAIT_S = 120.0
SETTLE_S = 1.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """Gaps in seconds; memory in bytes: the router's own, and the kernel's for all sockets."""

    gaps: list[float]
    rss: float
    sockets: float


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when a stream fails."""
    before = dict(os.environ)
    os.environ |= {
        "BATON_FAKE_STEP_MS": str(args.step_ms),
        "BATON_STALL_TIMEOUT_S": str(args.limit_s),
        "BATON_MAX_RUNNING": "1024",
        "BATON_MAX_WAITING": "4096",
    }
    try:
        return Report(asyncio.run(_measure(args)))
    finally:
        os.environ.clear()
        os.environ.update(before)


async def _measure(args: argparse.Namespace) -> list[Result]:
    http_port, grpc_port = free_ports(2)
    options = UpOptions(
        runner="fake", prefill=0, transport="loopback", http_port=http_port, grpc_port=grpc_port
    )
    load = Load.random(args.seed, args.streams, 16, args.output_tokens, args.streams)
    alone, beside = [], []
    async with fleet(options) as (layout, _):
        await _turn(layout, load)
        for number in range(args.rounds):
            alone.append(await _turn(layout, load))
            last = number == args.rounds - 1
            async with _crowd(layout, args, count=last) as crowd:
                await _made(layout)
                beside.append(await _turn(layout, load))
                if last:
                    say(f"waiting {args.limit_s:.0f} s and a little for the crowd to be cut")
                    await asyncio.sleep(args.limit_s * 1.25 + 5.0)
            told = crowd[0]
            say(
                f"round {number + 1} of {args.rounds}: p99 {1000 * _p99(alone[-1]):.1f} ms alone, "
                f"{1000 * _p99(beside[-1]):.1f} ms beside the crowd"
            )
    return _figures(args, alone, beside, told)


def _figures(
    args: argparse.Namespace, alone: list[Turn], beside: list[Turn], told: dict[str, Any]
) -> list[Result]:
    before, after = (median(map(_p99, turns)) for turns in (alone, beside))
    of_http, of_grpc = args.stalled - args.stalled // 2, args.stalled // 2
    cut = told["http_cut_s"]

    def both(name: str, unit: str, of: Callable[[Turn], float]) -> Result:
        return compared(name, median(map(of, beside)), unit, median(map(of, alone)))

    return [
        Result("readers that stall", args.stalled, ""),
        Result("senders that crawl", args.slow, ""),
        Result("neighbours", args.streams, "streams"),
        Result("a step of their worker", args.step_ms, "ms"),
        both(
            "between tokens, p50, median turn", "ms", lambda turn: 1000 * quantile(turn.gaps, 0.5)
        ),
        at_most("between tokens, p99, median turn", 1000 * after, "ms", GOAL, 1000 * before),
        both("router's memory, median turn", "MiB", lambda turn: turn.rss / MIB),
        both(
            "all sockets' memory in the kernel, median turn", "MiB", lambda turn: turn.sockets / MIB
        ),
        Result("limit without progress", args.limit_s, "s"),
        Result("stalled over HTTP that were cut", 100 * len(cut) / of_http, "%"),
        Result("cut over HTTP after, longest", max(cut, default=0.0), "s"),
        Result("stalled over gRPC that were cut", 100 * told["grpc_cut"] / of_grpc, "%"),
    ]


async def _turn(layout: Layout, load: Load) -> Turn:
    streams = [Stream() for _ in load.prompts]
    async with open_channel(layout.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def follow(prompt: tuple[int, ...], stream: Stream) -> None:
            try:
                asked = greedy(prompt, load.output_tokens)
                async for answer in stub.Generate(asked, timeout=REQUEST_TIMEOUT_S):
                    if answer.event.delta.token_ids:
                        stream.times.append(time.perf_counter())
            except grpc.aio.AioRpcError as error:
                raise BatonError(f"a stream failed: {error.details()}") from None

        await asyncio.gather(*map(follow, load.prompts, streams))
    read = await asyncio.to_thread(scrape, f"{layout.http}/metrics")
    gaps = [gap for stream in streams for gap in stream.gaps(0.0)]
    return Turn(gaps, read["process_resident_memory_bytes"], _socket_bytes())


async def _made(layout: Layout) -> None:
    """Returns when the crowd's answers are made, as far as anybody makes them."""
    (decode,) = (spec for spec in layout.processes if spec.role == "decode")
    async with asyncio.timeout(WAIT_S):
        while True:
            read = await asyncio.to_thread(scrape, f"http://{decode.metrics}/metrics")
            if not any(n for name, n in read.items() if name.startswith("baton_sequences{")):
                break
            await asyncio.sleep(0.25)
    await asyncio.sleep(SETTLE_S)


@asynccontextmanager
async def _crowd(
    layout: Layout, args: argparse.Namespace, *, count: bool
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yields a list that holds what the crowd says on leaving."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "baton_loadtest.bench.crowd"),
        *("--http", layout.http.removeprefix("http://"), "--grpc", layout.grpc),
        *("--stalled", str(args.stalled), "--slow", str(args.slow)),
        *(["--count"] if count else []),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MIB,
    )
    assert process.stdin is not None and process.stdout is not None
    told: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(WAIT_S):
            if b"ready" not in await process.stdout.readline():
                raise BatonError("the crowd could not be gathered")
        yield told
        process.stdin.close()
        async with asyncio.timeout(WAIT_S):
            told.append(json.loads(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _p99(turn: Turn) -> float:
    return quantile(turn.gaps, 0.99)


def _socket_bytes() -> float:
    """What the kernel holds in TCP buffers of this machine, where it says so."""
    try:
        for line in Path("/proc/net/sockstat").read_text().splitlines():
            if line.startswith("TCP:"):
                return float(max(1, int(line.split()[-1])) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        pass
    return math.nan
