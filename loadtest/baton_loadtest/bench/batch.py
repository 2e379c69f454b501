"""`baton bench batch`: what interactive streams notice of a `baton batch` beside them.

A decode worker is given a target for the time between two tokens. The same interactive requests, a
few at a time, are followed alone and beside a batch, in turns. The batch is the command itself; it
is stopped after its turn, and the next turn goes on with the same output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.cli.layout import Layout, UpOptions
from baton.cli.ports import free_ports
from baton.core.errors import BatonError
from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2_grpc
from baton_loadtest.bench.arrivals import ENGINE_CORE, OTHER_CORE
from baton_loadtest.bench.drain import Stream
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.bench.load import REQUEST_TIMEOUT_S, Load
from baton_loadtest.bench.process import say
from baton_loadtest.drive import greedy
from baton_loadtest.report import Report, Result, at_most, compared, quantile

LINES = 50_000
"""Of the batch: more than are answered."""

SETTLE_S = 5.0
WAIT_S = 60.0


@dataclass(slots=True)
class Side:
    """Interactive streams of all turns of one side, in seconds. lines: that the batch answered in
    batch_s."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    lines: int = 0
    batch_s: float = 0.0


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when a stream or the batch fails."""
    before = dict(os.environ)
    os.environ["BATON_INTER_TOKEN_MS"] = str(args.target_ms)
    try:
        with tempfile.TemporaryDirectory() as folder:
            alone, beside = asyncio.run(_measure(args, Path(folder)))
    finally:
        os.environ.clear()
        os.environ.update(before)

    def ms(times: list[float], share: float) -> float:
        return 1000 * quantile(times, share)

    return Report(
        [
            Result("interactive streams at a time", args.streams, ""),
            Result("configured target between tokens", args.target_ms, "ms"),
            Result("between tokens, p50, alone", ms(alone.gaps, 0.5), "ms"),
            Result("between tokens, p50, beside a batch", ms(beside.gaps, 0.5), "ms"),
            at_most("between tokens, p99, alone", ms(alone.gaps, 0.99), "ms", args.target_ms),
            at_most(
                "between tokens, p99, beside a batch", ms(beside.gaps, 0.99), "ms", args.target_ms
            ),
            compared(
                "first token, p50, beside a batch against alone",
                ms(beside.first, 0.5), "ms", ms(alone.first, 0.5),
            ),
            compared(
                "first token, p99, beside a batch against alone",
                ms(beside.first, 0.99), "ms", ms(alone.first, 0.99),
            ),
            Result(
                "batch, beside the streams",
                beside.lines * args.output_tokens / beside.batch_s, "tokens/s",
            ),
        ]
    )  # fmt: skip


async def _measure(args: argparse.Namespace, folder: Path) -> tuple[Side, Side]:
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    http_port, grpc_port = free_ports(2)
    options = UpOptions(
        model=args.model,
        prefill=0,
        transport="loopback",
        threads=1,
        http_port=http_port,
        grpc_port=grpc_port,
        engine_cpus=ENGINE_CORE,
        other_cpus=OTHER_CORE,
    )
    given, out = folder / "in.jsonl", folder / "out.jsonl"
    _write(given, args)
    alone, beside = Side(), Side()
    async with fleet(options) as (layout, _):
        # The decode worker learns what its steps cost, which its target needs.
        async with _batch(layout, given, out):
            await _turn(layout, args, 0, Side())
        for number in range(1, args.rounds + 1):
            await _turn(layout, args, number, alone)
            async with _batch(layout, given, out):
                before, began = _lines(out), time.perf_counter()
                await _turn(layout, args, number, beside)
                beside.batch_s += time.perf_counter() - began
                answered = _lines(out) - before
                if not answered:
                    raise BatonError("the batch answered nothing beside the streams")
                beside.lines += answered
            p99 = [1000 * quantile(side.gaps, 0.99) for side in (alone, beside)]
            say(f"turn {number} of {args.rounds}: p99 {p99[0]:.1f} ms alone, {p99[1]:.1f} beside")
    return alone, beside


async def _turn(layout: Layout, args: argparse.Namespace, number: int, side: Side) -> None:
    load = Load.random(
        args.seed + number, args.requests, args.prompt_tokens, args.output_tokens, args.streams
    )
    waiting = iter(load.prompts)
    async with open_channel(layout.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def client() -> None:
            for prompt in waiting:
                stream, asked = Stream(), time.perf_counter()
                try:
                    call = stub.Generate(
                        greedy(prompt, load.output_tokens), timeout=REQUEST_TIMEOUT_S
                    )
                    async for answer in call:
                        if answer.event.delta.token_ids:
                            stream.times.append(time.perf_counter())
                except grpc.aio.AioRpcError as error:
                    raise BatonError(f"a stream failed: {error.details()}") from None
                side.first.append(stream.times[0] - asked)
                side.gaps += stream.gaps(0.0)

        await asyncio.gather(*(client() for _ in range(args.streams)))


@asynccontextmanager
async def _batch(layout: Layout, given: Path, out: Path) -> AsyncIterator[None]:
    """The command, well under way; stopped as Ctrl-C would on leaving."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli.main", "batch", str(given), str(out)),
        *("--http", layout.http.removeprefix("http://")),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(SETTLE_S)
        yield
        if process.returncode is not None:
            raise BatonError("the batch ended before the streams did")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def _write(given: Path, args: argparse.Namespace) -> None:
    load = Load.random(args.seed - 1, LINES, args.prompt_tokens, 0, 0)
    with given.open("w") as file:
        for number, prompt in enumerate(load.prompts):
            body = {"prompt": prompt, "max_tokens": args.output_tokens, "ignore_eos": True}
            line = {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
