"""`baton bench tracing`: what tracing and metrics cost, in processor time of all five processes.

A pair is two Batons, started for it, that are asked the same at the same time: whatever the machine
does better one moment than the next, it does for both. One has every request traced to a receiver
and all metrics scraped meanwhile, the other neither. Only the five processes count: not the
receiver, nor who asks and scrapes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import string
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import fmean

from baton.cli.http_client import scrape
from baton.cli.layout import APART, Layout, UpOptions, plan
from baton.cli.ports import free_ports
from baton.cli.supervisor import Supervisor
from baton.core.errors import BatonError
from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from baton_loadtest.bench.beside import Beside
from baton_loadtest.bench.fleet import apart, supervised
from baton_loadtest.bench.pairs import check_count, ratio
from baton_loadtest.bench.process import check_cpu_clock, cpu_spent_s, say
from baton_loadtest.drive import greedy
from baton_loadtest.report import Report, Result, at_most

MOST_PERCENT = 3.0
SCRAPE_EVERY_S = 15.0
"""As the chart's monitors have it."""
SETTLE_S = 6.0
"""After the last token: the spans leave within it."""
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Side:
    """One Baton's share of a pair. spent_us: by role, of a token."""

    spent_us: dict[str, float]

    @property
    def token_us(self) -> float:
        return sum(self.spent_us.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """on: traced and scraped. spans: received. scrapes: of all processes."""

    on: Side
    off: Side
    spans: int
    scrapes: int


def measure(args: argparse.Namespace) -> Report:
    """Raises InvalidArgument; BatonError when a request is not answered in full, or not traced."""
    check_cpu_clock()
    check_count(args.pairs)
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    receiver = await Beside.start("spans", cores[-1])
    try:
        endpoint = (await receiver.ask(do="open"))["endpoint"]
        pairs = []
        for number in range(args.pairs):
            async with (
                _Bench.started(_layout(args, cores, endpoint)) as on,
                _Bench.started(_layout(args, cores, "")) as off,
            ):
                pairs.append(await _pair(args, number, on, off, receiver))
            last = pairs[-1]
            say(
                f"pair {number + 1} of {args.pairs}: {last.on.token_us:.0f} against "
                f"{last.off.token_us:.0f} us a token"
            )
    finally:
        await receiver.close()
    return _figures(pairs, args.requests)


async def _pair(
    args: argparse.Namespace, number: int, on: _Bench, off: _Bench, receiver: Beside
) -> Pair:
    for bench in (on, off):
        await bench.drive(_prompts(f"warm {number}", args.concurrency, args), args)
    await asyncio.sleep(SETTLE_S)
    await receiver.ask(do="take")
    before = on.spent_s(), off.spent_s()
    async with _scraped(on.layout) as scrapes:
        tokens, _ = await asyncio.gather(
            *(
                bench.drive(_prompts(f"{args.seed} {number}", args.requests, args), args)
                for bench in (on, off)
            )
        )
        await asyncio.sleep(SETTLE_S)
    traced, plain = [
        Side({role: 1e6 * (after[role] - first[role]) / tokens for role in first})
        for first, after in zip(before, (on.spent_s(), off.spent_s()), strict=True)
    ]
    found = await receiver.ask(do="take")
    if found["traces"] != args.requests:
        raise BatonError(f"{found['traces']} of {args.requests} requests were traced")
    return Pair(traced, plain, found["spans"], len(scrapes))


def _layout(args: argparse.Namespace, cores: list[int], endpoint: str) -> Layout:
    http, grpc = free_ports(2)
    options = UpOptions(
        model=args.model,
        local_prefill_tokens=APART,
        transport=args.transport,
        threads=1,
        http_port=http,
        grpc_port=grpc,
        engine_cpus=str(cores[0]),
        other_cpus=str(cores[-1]),
    )
    layout = plan(options)
    flags = ("--otlp-endpoint", endpoint, "--trace-sample-share", "1")
    return replace(
        layout,
        processes=tuple(
            replace(spec, command=(*spec.command, *flags)) for spec in layout.processes
        ),
    )


class _Bench:
    """A Baton that runs."""

    def __init__(self, layout: Layout, supervisor: Supervisor) -> None:
        self.layout = layout
        self._pids = {spec: supervisor.child(spec.name).pid for spec in layout.processes}

    @classmethod
    @asynccontextmanager
    async def started(cls, layout: Layout) -> AsyncIterator[_Bench]:
        with apart():
            async with supervised(layout, lambda *_: None) as supervisor:
                yield cls(layout, supervisor)

    def spent_s(self) -> dict[str, float]:
        """Processor time so far, by role."""
        return {spec.role: cpu_spent_s(pid) for spec, pid in self._pids.items()}

    async def drive(self, prompts: Iterator[str], args: argparse.Namespace) -> int:
        """Runs the requests, so many at a time; how many tokens came. Raises BatonError."""
        tokens = 0
        async with open_channel(self.layout.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def worker() -> None:
                nonlocal tokens
                for prompt in prompts:
                    request: inference_pb2.GenerateRequest = greedy((), args.output_tokens)
                    request.text = prompt
                    came = 0
                    async for response in stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
                        came += len(response.event.delta.token_ids)
                    if came != args.output_tokens:
                        raise BatonError(f"{came} of {args.output_tokens} tokens came")
                    tokens += came

            await asyncio.gather(*(worker() for _ in range(args.concurrency)))
        return tokens


@asynccontextmanager
async def _scraped(layout: Layout) -> AsyncIterator[list[float]]:
    """Reads all processes' metrics again and again, as Prometheus would.

    What it gives are the times at which it did.
    """
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    urls = [layout.metrics_url(spec) for spec in layout.processes]

    async def go_on() -> None:
        while True:
            times.append(clock())
            for url in urls:
                await asyncio.to_thread(scrape, url)
            await asyncio.sleep(max(0.0, times[-1] + SCRAPE_EVERY_S - clock()))

    scraping = asyncio.create_task(go_on())
    try:
        yield times
    finally:
        scraping.cancel()
        await asyncio.wait({scraping})
    if not scraping.cancelled():
        scraping.result()


def _prompts(seed: str, count: int, args: argparse.Namespace) -> Iterator[str]:
    """Text, so that the tokenizer has its part; each its own from the first letter on."""
    draw = random.Random(seed)
    for _ in range(count):
        words = ("".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(args.words))
        yield " ".join(words)


def _figures(pairs: list[Pair], requests: int) -> list[Result]:
    found = ratio([(pair.on.token_us, pair.off.token_us) for pair in pairs])

    def percent(value: float) -> float:
        return 100 * (value - 1)

    def beside(name: str, on: list[float], off: list[float]) -> Result:
        pair = ratio(list(zip(on, off, strict=True)))
        return Result(name, fmean(on), "us", fmean(off), pair.mean)

    results = [
        beside(
            "CPU a token, all processes",
            [pair.on.token_us for pair in pairs],
            [pair.off.token_us for pair in pairs],
        ),
        Result("what tracing and metrics add", percent(found.mean), "%"),
        Result("lower end of its 95 % interval", percent(found.low), "%"),
        at_most("upper end of its 95 % interval", percent(found.high), "%", MOST_PERCENT),
    ]
    results += [
        beside(
            f"CPU a token, {role}",
            [pair.on.spent_us[role] for pair in pairs],
            [pair.off.spent_us[role] for pair in pairs],
        )
        for role in pairs[0].on.spent_us
    ]
    spans = fmean(pair.spans for pair in pairs) / requests
    scrapes = fmean(pair.scrapes for pair in pairs)
    return [
        *results,
        Result("spans received of a request", spans, ""),
        Result("scrapes of each process, of a pair", scrapes, ""),
    ]
