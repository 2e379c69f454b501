"""`baton bench drain`: how long streams pause when the worker they decode on leaves.

It leaves twice, with as many streams on it: told to drain, it hands their KV to the other decode
worker; killed, their KV is gone and the other one computes it again, who has nothing of these
prompts in its cache. A stream's pause is its longest gap between two tokens after the signal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.cli.http_client import scrape
from baton.cli.layout import Layout, UpOptions
from baton.cli.ports import free_ports
from baton.cli.supervisor import Supervisor
from baton.core.errors import BatonError
from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2_grpc
from baton_loadtest.bench import shapes
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.bench.load import REQUEST_TIMEOUT_S, Load, drive
from baton_loadtest.bench.process import say
from baton_loadtest.drive import greedy
from baton_loadtest.report import Bars, Report, Result, compared, quantile

SETTLED_TOKENS = 8
"""Of every stream before anything happens."""

WAIT_S = 300.0
POLL_S = 0.05

Live = Callable[[str], float]
"""How many workers of a role the router knows."""


@dataclass(slots=True)
class Stream:
    """One request's tokens and when some came, in seconds of one clock."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def gaps(self, since: float) -> list[float]:
        """Between events with tokens, of which the later one came after a time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > since]


@dataclass(slots=True)
class Leaving:
    """What one way to leave did. tokens: each stream's. computed: input tokens since the signal."""

    tokens: list[list[int]]
    pauses: list[float]
    gaps: list[float]
    computed: float
    moved: float


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when a stream's tokens differ from an undisturbed one's."""
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.with_tokenizer(shapes.folder(args.shape), Path(folder))
        drained, killed = asyncio.run(_measure(args, str(model)))
    results = [
        Result("streams on the worker that leaves", args.running, ""),
        Result("prompt tokens of each", args.prompt_tokens, ""),
        Result("between tokens before, p50", 1000 * quantile(drained.gaps, 0.5), "ms"),
        Result("streams whose KV moved", drained.moved, ""),
        Result("input tokens computed again, drained", drained.computed, ""),
        Result("input tokens computed again, killed", killed.computed, ""),
    ]
    for share in (0.5, 0.99):
        pause, again = (1000 * quantile(side.pauses, share) for side in (drained, killed))
        name = f"pause, p{round(100 * share)}, KV moved against prefilled again"
        results.append(compared(name, pause, "ms", again))
    bars = tuple(
        (f"{name}, p{round(100 * share)}", 1000 * quantile(side.pauses, share))
        for name, side in (("moved", drained), ("prefilled again", killed))
        for share in (0.5, 0.99)
    )
    return Report(results, (Bars("pause of a stream", "ms", bars),))


async def _measure(args: argparse.Namespace, model: str) -> tuple[Leaving, Leaving]:
    http_port, grpc_port = free_ports(2)
    options = UpOptions(
        model=model,
        prefill=0,
        decode=2,
        transport=args.transport,
        threads=args.threads,
        http_port=http_port,
        grpc_port=grpc_port,
    )
    ways = {"drained": signal.SIGTERM, "killed": signal.SIGKILL}
    loads = [
        Load.random(seed, args.running, args.prompt_tokens, args.output_tokens, args.running)
        for seed in range(args.seed, args.seed + len(ways))
    ]
    async with fleet(options) as (layout, supervisor):
        sides = []
        for (name, number), load in zip(ways.items(), loads, strict=True):
            say(name)
            sides.append(await _Side(layout, supervisor, load).leave(number))
        say("undisturbed")
        for name, side, load in zip(ways, sides, loads, strict=True):
            if (await drive(layout.grpc, load)).token_ids != side.tokens:
                raise BatonError(f"a stream whose worker was {name} gave other tokens")
    return sides[0], sides[1]


class _Side:
    """One way to leave. Decode prefills: what the other worker has cached is all that there is."""

    def __init__(self, layout: Layout, supervisor: Supervisor, load: Load) -> None:
        self._layout, self._supervisor, self._load = layout, supervisor, load
        self._metrics = f"{layout.http}/metrics"

    async def leave(self, number: signal.Signals) -> Leaving:
        """Fills one decode worker with streams, makes it leave, and follows them to their end."""
        await self._until(lambda live: live("decode") == 2)
        stays, leaves = self._decodes()
        streams = [Stream() for _ in self._load.prompts]
        async with open_channel(self._layout.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            # While it is frozen, all streams begin on the other one.
            os.kill(stays, signal.SIGSTOP)
            try:
                await self._until(lambda live: live("decode") == 1)
                following = [
                    asyncio.create_task(self._follow(stub, prompt, stream))
                    for prompt, stream in zip(self._load.prompts, streams, strict=True)
                ]
                try:
                    await self._until(lambda _: _settled(streams), following)
                    os.kill(stays, signal.SIGCONT)
                    await self._until(lambda live: live("decode") == 2, following)
                    return await self._leave(number, leaves, streams, following)
                finally:
                    for task in following:
                        task.cancel()
                    await asyncio.gather(*following, return_exceptions=True)
            finally:
                os.kill(stays, signal.SIGCONT)

    async def _leave(
        self,
        number: signal.Signals,
        leaves: int,
        streams: list[Stream],
        following: list[asyncio.Task[None]],
    ) -> Leaving:
        if any(len(s.token_ids) == self._load.output_tokens for s in streams):
            raise BatonError("a stream ended before its worker left: ask for more output tokens")
        before = await self._counters(leaves)
        told = time.perf_counter()
        os.kill(leaves, number)
        await asyncio.gather(*following)
        after = await self._counters(leaves)
        return Leaving(
            tokens=[stream.token_ids for stream in streams],
            pauses=[max(stream.gaps(told)) for stream in streams],
            gaps=[
                gap
                for stream in streams
                for gap in Stream(times=[t for t in stream.times if t < told]).gaps(0.0)
            ],
            computed=after[0] - before[0],
            moved=after[1] - before[1],
        )

    async def _follow(
        self, stub: inference_pb2_grpc.InferenceAsyncStub, prompt: tuple[int, ...], stream: Stream
    ) -> None:
        asked = greedy(prompt, self._load.output_tokens)
        try:
            async for response in stub.Generate(asked, timeout=REQUEST_TIMEOUT_S):
                ids = response.event.delta.token_ids
                if ids:
                    stream.token_ids.extend(ids)
                    stream.times.append(time.perf_counter())
        except grpc.aio.AioRpcError as error:
            raise BatonError(f"a stream failed: {error.details()}") from None

    def _decodes(self) -> list[int]:
        processes = self._supervisor.description()["processes"]
        return [process["pid"] for process in processes if process["role"] == "decode"]

    async def _until(
        self, reached: Callable[[Live], bool], following: Sequence[asyncio.Task[None]] = ()
    ) -> None:
        """Raises TimeoutError, and what a stream that is followed meanwhile raised."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for task in following:
                    if task.done():
                        task.result()
                if reached(_live_in(await asyncio.to_thread(scrape, self._metrics))):
                    return
                await asyncio.sleep(POLL_S)

    async def _counters(self, leaves: int) -> tuple[float, float]:
        """Input tokens that those who stay have computed, and sequences that have moved."""
        computed = 0.0
        for process in self._supervisor.description()["processes"]:
            if process["role"] == "decode" and process["pid"] != leaves:
                read = await asyncio.to_thread(_scrape_or_nothing, process["metrics"])
                computed += read.get("baton_prefill_tokens_total", 0.0)
        router = await asyncio.to_thread(scrape, self._metrics)
        return computed, router.get('baton_moves_total{outcome="moved"}', 0.0)


def _settled(streams: Sequence[Stream]) -> bool:
    return all(len(stream.token_ids) >= SETTLED_TOKENS for stream in streams)


def _live_in(read: dict[str, float]) -> Live:
    return lambda role: read[f'baton_workers{{role="{role}",state="serving"}}']


def _scrape_or_nothing(url: str) -> dict[str, float]:
    """Of a process that may only just start: it has computed nothing then."""
    try:
        return scrape(url)
    except OSError:
        return {}
