"""`baton bench router`: what the router itself costs, in time and in processor time.

A real router between synthetic workers and clients that only count, so that nothing but the router
is measured. It has a core of its own where the machine has two; workers and clients share another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.rpc.lifecycle import PARENT_VARIABLE
from baton_loadtest.bench.beside import Beside
from baton_loadtest.bench.process import ContenderFailed, check_cpu_clock, cpu_spent_s, say
from baton_loadtest.report import Report, Result, at_most, quantile

FACES = {"grpc": "gRPC", "http": "SSE"}
ADDED_MS, EACH_US, COALESCED_US = 3.0, 80.0, 30.0
SERVE_S = 0.005
PROMPT_WORDS = 512
WARM_REQUESTS = 20
EACH_STREAMS, EACH_STEP_S = 64, 0.025
MANY_STEP_S = 0.25
OPENING_STEP_S = 60.0
"""While streams begin, those that have begun rest."""
SETTLE_S = 2.0
START_S = 60.0
OPEN_FILES = 16384
AGE_S = 3600
"""These clients keep a connection: one that is told to go elsewhere would have nowhere to go."""


@dataclass(frozen=True, slots=True)
class Router:
    """The running process. faces: by name, as host:port."""

    pid: int
    faces: dict[str, str]

    def spent_s(self) -> float:
        """User and system time of all its threads so far."""
        return cpu_spent_s(self.pid)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a stretch of streaming took. seconds: of the clock; spent_s: of the processor."""

    seconds: float
    spent_s: float
    tokens: int
    events: int

    @property
    def token_us(self) -> float:
        return 1e6 * self.spent_s / self.tokens


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when a stream ends that must not."""
    check_cpu_clock()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    own, other = cores[0], cores[-1]
    async with _beside("synthetic", other) as workers, _beside("router_clients", other) as clients:
        addresses = await workers.ask(do="open", serve_s=SERVE_S)
        async with _router(addresses, own, args.streams) as router:
            await clients.ask(do="meet", faces=router.faces)
            bench = _Bench(router, workers, clients, args)
            results = [figure for face in FACES for figure in await bench.added(face)]
            for face in FACES:
                results += await bench.each(face)
            for face in FACES:
                results += await bench.many(face)
    return results


class _Bench:
    """The measurements, on what runs."""

    def __init__(
        self, router: Router, workers: Beside, clients: Beside, args: argparse.Namespace
    ) -> None:
        self._router, self._workers, self._clients, self._args = router, workers, clients, args

    async def added(self, face: str) -> list[Result]:
        """Time to the first text, less what the workers say they took for it."""
        await self._times(face, WARM_REQUESTS)
        times = await self._times(face, self._args.requests)
        name = f"added to the time to first token, {FACES[face]}"
        return [
            at_most(f"{name}, p50", 1000 * quantile(times, 0.5), "ms", ADDED_MS),
            Result(f"{name}, p99", 1000 * quantile(times, 0.99), "ms"),
        ]

    async def _times(self, face: str, requests: int) -> list[float]:
        total = await self._clients.ask(
            do="times", face=face, requests=requests, words=PROMPT_WORDS
        )
        served = (await self._workers.ask(do="times")).values()
        return [
            seconds - sum(times[request] for times in served) for request, seconds in total.items()
        ]

    async def each(self, face: str) -> list[Result]:
        """Every token an event of its own."""
        cost = await self._stream(face, EACH_STREAMS, EACH_STEP_S)
        name = f"CPU a token, {EACH_STREAMS} streams x {1 / EACH_STEP_S:g} tokens/s, {FACES[face]}"
        return [
            at_most(name, cost.token_us, "us", EACH_US),
            Result(f"{name}: tokens an event", cost.tokens / cost.events, ""),
        ]

    async def many(self, face: str) -> list[Result]:
        """So many that the router has to take some together, unless it keeps up."""
        streams = self._args.streams
        cost = await self._stream(face, streams, MANY_STEP_S)
        name = f"CPU a token, {streams} streams x {1 / MANY_STEP_S:g} tokens/s, {FACES[face]}"
        return [
            at_most(name, cost.token_us, "us", COALESCED_US),
            Result(f"{name}: tokens an event", cost.tokens / cost.events, ""),
            Result(f"{name}: delivered", cost.tokens / cost.seconds, "tokens/s"),
            Result(f"{name}: of the router's core", 100 * cost.spent_s / cost.seconds, "%"),
        ]

    async def _stream(self, face: str, streams: int, step_s: float) -> Cost:
        """Streams that all run for a while."""
        say(f"{streams} streams over {FACES[face]}")
        clock = asyncio.get_running_loop().time
        await self._workers.ask(do="step", step_s=OPENING_STEP_S)
        try:
            await self._clients.ask(do="open", face=face, streams=streams)
            await self._workers.ask(do="step", step_s=step_s)
            await asyncio.sleep(SETTLE_S)
            before, began, spent_s = (
                await self._clients.ask(do="tally"),
                clock(),
                self._router.spent_s(),
            )
            await asyncio.sleep(self._args.seconds)
            after, spent_s = await self._clients.ask(do="tally"), self._router.spent_s() - spent_s
            seconds = clock() - began
        finally:
            await self._clients.ask(do="close")
        if (await self._workers.ask(do="sessions"))["sessions"] > 1:
            raise BatonError("the router lost its decode worker: this machine is too busy")
        if after["ended"]:
            raise BatonError(f"{after['ended']} of {streams} streams ended")
        await asyncio.sleep(SETTLE_S)
        tokens, events = (after[what] - before[what] for what in ("tokens", "events"))
        return Cost(seconds, spent_s, tokens, events)


@asynccontextmanager
async def _beside(module: str, core: int) -> AsyncIterator[Beside]:
    process = await Beside.start(module, core)
    try:
        yield process
    finally:
        await process.close()


@asynccontextmanager
async def _router(addresses: dict[str, str], core: int, streams: int) -> AsyncIterator[Router]:
    """A router of these workers, ready. Raises ContenderFailed."""
    pin = ["taskset", "-c", str(core)] if shutil.which("taskset") else []
    allowed = streams + EACH_STREAMS
    flags = [f"--{role}s={address}" for role, address in addresses.items()]
    process = await asyncio.create_subprocess_exec(
        *pin,
        sys.executable,
        "-m",
        "baton.router",
        *flags,
        f"--max-requests={allowed}",
        f"--max-connections={allowed}",
        f"--connection-max-age-s={AGE_S}",
        f"--max-connections-per-address={allowed}",
        "--log-level=warning",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line:
            raise ContenderFailed("the router did not start")
        said = json.loads(line)
        yield Router(process.pid, {face: said[face] for face in FACES})
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
