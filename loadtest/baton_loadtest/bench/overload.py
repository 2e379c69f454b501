"""`baton bench overload`: goodput, refusals and memory at up to ten times the fleet's capacity.

The capacity is measured first, in a closed loop. Then requests arrive in an open loop; goodput
counts those answered within their objectives. Last is a retry storm: at twice the capacity every
refused client retries at once, five times; then arrivals fall to 0.7 of the capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from baton_loadtest.bench.options import MODEL, TRANSPORT, option
from baton_loadtest.child import progress
from baton_loadtest.drive import (
    ANSWERED,
    ORDINARY,
    REFUSED,
    HttpLoadClient,
    LoadLimits,
    OnTokens,
    OpenLoop,
    Sample,
    TokenIds,
    closed,
    random_prompts,
)
from baton_loadtest.launch import RunningBaton, call, fleet, resident_bytes, stay_off_the_engine
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from baton_loadtest.report import Report, Result, at_most, compared, ms, quantile
from batonlm.cli.access import Access
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError
from batonlm.rpc.loop import Loop

PLOTS = False
LOAD_OPTIONS = (
    MODEL,
    TRANSPORT,
    option("--prompt-tokens", 256),
    option("--output-tokens", 32),
    option("--seconds", 20.0, "of each load"),
    option("--queue-s", 0.5, "the routers' max_queue_s"),
    option("--first-s", 2.0, "objective: to the first token"),
    option("--between-s", 0.25, "objective: between tokens, on average of a request"),
)
OPTIONS = (*LOAD_OPTIONS, option("--factors", (0.5, 1.0, 2.0, 5.0, 10.0), "of capacity"))

STORM, AFTER = 2.0, 0.7
GOODPUT, REFUSAL_MS, FIRST_TOKEN, FLAT, BACK_S = 0.9, 50.0, 2.0, 1.1, 10.0
ENOUGH = 0.9
"""Share of a second's arrivals answered within their objectives at which goodput has recovered."""

SECONDS_IN_A_ROW = 3
AT_ONCE = 96
"""Concurrency of the closed loop that measures the capacity: more than run at a time."""

WARM_S = 6.0
SEARCH_S = 12.0
SETTLING_S = 3.0
SAMPLE_S = 0.5
END_S = 60.0
"""A request that has not ended this long after the last arrival counts as failed."""

RETRIES_AT_ONCE = 5
PAUSE_S = 0.25
"""Pause of a closed-loop client after a refusal."""

VISIBLE_TOKEN = 70
"""A letter in most vocabularies, which all answers are biased to: an answer that begins with half a
character has no text, so the time of its first token would be unknown."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Stream:
    """Poisson arrivals of one client."""

    rate: float
    """Requests per second."""
    key: str = ""
    routers: tuple[int, ...] = (0,)
    """The indices of the routers to use in turn."""


class _Refusals:
    """A client of several routers that records refusals, and may retry at once."""

    def __init__(self, clients: Sequence[HttpLoadClient], retries: int) -> None:
        self.refusals_s: list[float] = []
        """The duration of each refused request."""
        self._clients, self._retries = clients, retries
        self._turns = count()
        self.prepare = clients[0].prepare

    async def ask(self, request: bytes, on_tokens: OnTokens) -> str:
        client = self._clients[next(self._turns) % len(self._clients)]
        for _ in range(1 + self._retries):
            began = time.perf_counter()
            end = await client.ask(request, on_tokens)
            if end != REFUSED:
                break
            self.refusals_s.append(time.perf_counter() - began)
        return end

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    @property
    def retry_after_s(self) -> list[float]:
        return [seconds for client in self._clients for seconds in client.retry_after_s]


def run_load(job: dict[str, Any]) -> dict[str, Any]:
    """job: routers (host:port of each), fields (of every body), prompt_tokens, output_tokens, seed,
    name, seconds, retries; streams (as Stream), or at_once for a closed loop.

    Returns for each stream its samples, refusals_s and retry_after_s.
    """
    with asyncio.Runner(loop_factory=Loop) as runner:
        return {"streams": runner.run(_run_load(job))}


async def _run_load(job: dict[str, Any]) -> list[dict[str, Any]]:
    streams = [Stream(**stream) for stream in job["streams"]]
    clients = []
    for stream in streams:
        accesses = [Access(job["routers"][index], key=stream.key) for index in stream.routers]
        each = [HttpLoadClient(access, fields=job["fields"]) for access in accesses]
        clients.append(_Refusals(each, job["retries"]))

    async def arriving(number: int) -> list[Sample]:
        seed = 100 * job["seed"] + number
        source = Drawn(
            Arrivals(Kind.POISSON, streams[number].rate, job["seconds"]),
            fixed(job["prompt_tokens"], job["output_tokens"]),
        )
        limits = LoadLimits(open=2**20, request_s=job["seconds"] + END_S, rest_s=END_S)
        loop = OpenLoop(clients[number], TokenIds(seed, *ORDINARY), limits)
        return (await loop.run(source.workload(seed))).samples

    try:
        if job["at_once"]:
            prompts = random_prompts(job["seed"], 100 * job["at_once"], job["prompt_tokens"])
            requests = (clients[0].prepare(prompt, job["output_tokens"]) for prompt in prompts)
            seconds = job["seconds"]
            found = [
                await closed(clients[0], requests, job["at_once"], seconds=seconds, pause_s=PAUSE_S)
            ]
        else:
            found = list(await asyncio.gather(*map(arriving, range(len(streams)))))
    finally:
        for client in clients:
            await client.close()
    answered = sum(one.end == ANSWERED for samples in found for one in samples)
    progress(f"{job['name']}: {sum(map(len, found))} asked, {answered} answered in full")
    return [
        {
            "samples": [asdict(one) | {"gaps_s": [], "ids": []} for one in samples],
            "refusals_s": client.refusals_s,
            "retry_after_s": client.retry_after_s,
        }
        for samples, client in zip(found, clients, strict=True)
    ]


@dataclass(slots=True)
class StreamLoad:
    """The results of one stream in one phase."""

    samples: list[Sample]
    refusals_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)

    def met(self, args: argparse.Namespace) -> int:
        """Returns the number of requests answered within their objectives, from when they were
        sent."""
        return sum(_meets(one, args) for one in self.samples)

    def first_token_ms(self, share: float) -> float:
        """Of answered requests."""
        return ms([s.first_s - s.left_s for s in self.samples if s.end == ANSWERED], share)

    @property
    def refused(self) -> int:
        return sum(one.end == REFUSED for one in self.samples)

    @property
    def failed(self) -> int:
        """The number of requests neither answered in full nor refused."""
        return sum(one.end not in (ANSWERED, REFUSED) for one in self.samples)

    def lag_ms(self, share: float) -> float:
        """Returns a quantile of how much later requests were sent than they were due."""
        return ms([one.lag_s for one in self.samples], share)


def _meets(sample: Sample, args: argparse.Namespace) -> bool:
    return sample.meets(args.first_s + sample.lag_s, args.between_s)


@dataclass(slots=True)
class Phase:
    """One phase of a load, and the fleet's resource usage in it."""

    name: str
    seconds: float
    streams: list[StreamLoad]
    rss: dict[str, int]
    """The maximum resident memory of each process, in bytes."""
    cpu: dict[str, float]
    """CPU time of each process, in seconds."""
    elapsed_s: float
    """Until the last answer."""

    @property
    def whole(self) -> StreamLoad:
        """All streams together."""
        return StreamLoad(
            [one for stream in self.streams for one in stream.samples],
            [one for stream in self.streams for one in stream.refusals_s],
            [one for stream in self.streams for one in stream.retry_after_s],
        )

    def goodput(self, args: argparse.Namespace) -> float:
        """Returns the requests per second answered within their objectives."""
        return self.whole.met(args) / self.seconds

    def cores(self, role: str) -> float:
        """Returns the CPU time of all processes of a role, in cores."""
        used = sum(seconds for name, seconds in self.cpu.items() if name.startswith(role))
        return used / self.elapsed_s


class FleetLoad:
    """Runs the phases of a load on one fleet."""

    def __init__(self, args: argparse.Namespace, running: RunningBaton, key: str = "") -> None:
        self._running = running
        self._key = key
        command = next(s.command for s in running.layout.processes if s.role == "decode")
        self._job = {
            "routers": running.routers,
            "fields": {
                "model": command[command.index("--model-name") + 1],
                "logit_bias": {str(VISIBLE_TOKEN): 100},
            },
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "seed": args.seed,
        }

    async def capacity(self) -> float:
        """Returns the completed requests per second in a closed loop. Raises BatonError for
        none."""
        streams = [Stream(0.0, self._key)]
        await self.phase("warm up", WARM_S, streams=streams, at_once=AT_ONCE)
        found = await self.phase("search", SEARCH_S, streams=streams, at_once=AT_ONCE)
        ends = [one.ended_s for one in found.whole.samples if one.end == ANSWERED]
        counted = sum(SETTLING_S < end <= SEARCH_S for end in ends)
        if not counted:
            raise BatonError("nothing was answered while capacity was looked for")
        return counted / (SEARCH_S - SETTLING_S)

    async def phase(
        self,
        name: str,
        seconds: float,
        *,
        streams: Sequence[Stream] = (),
        retries: int = 0,
        at_once: int = 0,
    ) -> Phase:
        self._job["seed"] += 1
        job = {
            **self._job,
            "name": name,
            "seconds": seconds,
            "streams": [asdict(stream) for stream in streams],
            "retries": retries,
            "at_once": at_once,
        }
        deadline_s = seconds + END_S + 30
        working = asyncio.create_task(
            asyncio.to_thread(call, run_load, job, threads=1, deadline_s=deadline_s)
        )
        rss: dict[str, int] = {}
        began, before = time.perf_counter(), self._running.spent_s()
        while not working.done():
            for process, pid in self._running.pids().items():
                rss[process] = max(rss.get(process, 0), resident_bytes(pid))
            await asyncio.wait([working], timeout=SAMPLE_S)
        elapsed_s = time.perf_counter() - began
        after = self._running.spent_s()
        found = [
            StreamLoad(
                [Sample(**one) for one in stream["samples"]],
                stream["refusals_s"],
                stream["retry_after_s"],
            )
            for stream in working.result()["streams"]
        ]
        cpu = {process: spent - before.get(process, 0.0) for process, spent in after.items()}
        return Phase(name, seconds, found, rss, cpu, elapsed_s)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if the fleet answers nothing."""
    stay_off_the_engine()
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    options = UpOptions(
        model=args.model,
        transport=args.transport,
        router_flags=("--max-queue-s", str(args.queue_s)),
    )
    async with fleet(options, pin=True) as running:
        load = FleetLoad(args, running)
        capacity = await load.capacity()

        def times(factor: float) -> list[Stream]:
            return [Stream(factor * capacity)]

        phases = {
            factor: await load.phase(f"{factor:g}x", args.seconds, streams=times(factor))
            for factor in args.factors
        }
        storm = await load.phase(
            "storm", args.seconds, streams=times(STORM), retries=RETRIES_AT_ONCE
        )
        after = await load.phase("after", 2 * BACK_S, streams=times(AFTER))
    return _figures(args, capacity, phases, storm, after)


def _figures(
    args: argparse.Namespace,
    capacity: float,
    by_factor: Mapping[float, Phase],
    storm: Phase,
    after: Phase,
) -> list[Result]:
    phases = list(by_factor.values())
    every = [*phases, storm, after]
    peak = max(phase.goodput(args) for phase in phases)
    if not peak:
        raise BatonError("no request was answered within its objectives")
    worst, plain = phases[-1], by_factor[min(by_factor, key=lambda factor: abs(factor - 1))]
    found = [
        Result(f"capacity, {AT_ONCE} requests at a time", capacity, "requests/s"),
        Result("prompt tokens", args.prompt_tokens, ""),
        Result("output tokens", args.output_tokens, ""),
        Result("longest foretold wait that is let in", 1000 * args.queue_s, "ms"),
        Result("objective, first token", 1000 * args.first_s, "ms"),
        Result("objective, between tokens", 1000 * args.between_s, "ms"),
    ]
    for phase in phases:
        goal = GOODPUT if phase is worst else None
        name = f"goodput at {phase.name} against the peak"
        found.append(compared(name, phase.goodput(args), "requests/s", peak, goal))
    for phase in phases:
        whole = phase.whole
        refused = 100 * whole.refused / max(1, len(whole.samples))
        found += [
            Result(f"refused at {phase.name}", refused, "%"),
            Result(f"first token at {phase.name}, p50", whole.first_token_ms(0.5), "ms"),
            Result(f"the router's CPU at {phase.name}", phase.cores("router"), "cores"),
        ]
    loaded = worst.whole
    found += [
        at_most(
            f"first token at {worst.name} against {plain.name}, p99",
            loaded.first_token_ms(0.99),
            "ms",
            FIRST_TOKEN,
            plain.whole.first_token_ms(0.99),
        ),
        at_most(f"refusals at {worst.name}, p99", ms(loaded.refusals_s, 0.99), "ms", REFUSAL_MS),
        Result(f"Retry-After at {worst.name}, p50", quantile(loaded.retry_after_s, 0.5), "s"),
        Result("failed otherwise", sum(phase.whole.failed for phase in every), ""),
    ]
    for index, (name, size) in enumerate(worst.rss.items()):
        role = name.partition("-")[0]
        text = f"memory of {role} {index} at {worst.name} against {plain.name}"
        known = plain.rss.get(name, size)
        found.append(at_most(text, size / MIB, "MiB", FLAT, known / MIB))
    lag = max(phase.whole.lag_ms(0.99) for phase in every)
    return [
        *found,
        Result("the load's own lag, p99 of the worst phase", lag, "ms"),
        at_most(
            "seconds until goodput is back after a retry storm", _back(args, after), "s", BACK_S
        ),
    ]


def _back(args: argparse.Namespace, after: Phase) -> float:
    """Returns the seconds until nearly all arrivals are answered within their objectives for
    good."""
    arrived: list[list[bool]] = [[] for _ in range(int(after.seconds))]
    for one in after.whole.samples:
        if int(one.due_s) < len(arrived):
            arrived[int(one.due_s)].append(_meets(one, args))
    good = [not each or sum(each) >= ENOUGH * len(each) for each in arrived]
    for second in range(len(good) - SECONDS_IN_A_ROW + 1):
        if all(good[second : second + SECONDS_IN_A_ROW]):
            return float(second)
    return after.seconds
