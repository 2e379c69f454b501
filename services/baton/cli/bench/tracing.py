"""`baton bench tracing`: what tracing and metrics cost, in processor time of all five processes.

A pair is the same requests on two Batons, one after the other, each started for it: with every
request traced to a receiver and all metrics scraped, and with neither. Which comes first changes
from pair to pair. Only the five processes count: not the receiver, nor who asks and scrapes.
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

from baton.cli.bench.beside import Beside
from baton.cli.bench.fleet import supervised
from baton.cli.bench.pairs import check_count, ratio
from baton.cli.bench.process import check_cpu_clock, cpu_spent_s, say
from baton.cli.bench.report import Report
from baton.cli.layout import APART, Layout, UpOptions, plan
from baton.cli.loadtest.over_grpc import greedy
from baton.cli.ports import free_ports
from baton.cli.results import Result, at_most
from baton.cli.scrape import scrape
from baton.core.errors import BatonError
from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc

MOST_PERCENT = 3.0
SCRAPE_EVERY_S = 1.0
SETTLE_S = 3.0
"""After the last token: the spans leave within it, and on the other side it is waited as well."""
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Side:
    """One Baton's share of a pair. spent_us: by role, of a token. scrapes: of all processes."""

    spent_us: dict[str, float]
    spans: int = 0
    scrapes: int = 0

    @property
    def token_us(self) -> float:
        return sum(self.spent_us.values())


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
            sides = {}
            for traced in (True, False) if number % 2 else (False, True):
                bench = _Bench(args, number, receiver if traced else None)
                sides[traced] = await bench.run(_layout(args, cores, endpoint if traced else ""))
            pairs.append((sides[True], sides[False]))
            say(
                f"pair {number + 1} of {args.pairs}: {sides[True].token_us:.0f} against "
                f"{sides[False].token_us:.0f} us a token"
            )
    finally:
        await receiver.close()
    return _figures(pairs, args.requests)


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
    """One side of one pair. receiver: None where nothing is traced and nothing scraped."""

    def __init__(self, args: argparse.Namespace, number: int, receiver: Beside | None) -> None:
        self._args, self._number, self._receiver = args, number, receiver

    async def run(self, layout: Layout) -> Side:
        args, receiver = self._args, self._receiver
        async with supervised(layout, lambda *_: None) as supervisor:
            pids = {spec: supervisor.child(spec.name).pid for spec in layout.processes}

            def spent_s() -> dict[str, float]:
                return {spec.role: cpu_spent_s(pid) for spec, pid in pids.items()}

            await _drive(
                layout.grpc, _prompts(f"warm {self._number}", args.concurrency, args), args
            )
            await asyncio.sleep(SETTLE_S)
            if receiver is not None:
                await receiver.ask(do="take")
            before = spent_s()
            async with _scraped(layout if receiver is not None else None) as scrapes:
                prompts = _prompts(f"{args.seed} {self._number}", args.requests, args)
                tokens = await _drive(layout.grpc, prompts, args)
                await asyncio.sleep(SETTLE_S)
            after = spent_s()
        spent = {role: 1e6 * (after[role] - before[role]) / tokens for role in before}
        if receiver is None:
            return Side(spent)
        found = await receiver.ask(do="take")
        if found["traces"] != args.requests:
            raise BatonError(f"{found['traces']} of {args.requests} requests were traced")
        return Side(spent, found["spans"], len(scrapes))


@asynccontextmanager
async def _scraped(layout: Layout | None) -> AsyncIterator[list[float]]:
    """Reads all processes' metrics again and again, as Prometheus would; None: does not.

    What it gives are the times at which it did.
    """
    clock = asyncio.get_running_loop().time
    times: list[float] = []
    urls = [] if layout is None else [layout.metrics_url(spec) for spec in layout.processes]

    async def go_on() -> None:
        while True:
            times.append(clock())
            for url in urls:
                await asyncio.to_thread(scrape, url)
            await asyncio.sleep(max(0.0, times[-1] + SCRAPE_EVERY_S - clock()))

    scraping = asyncio.create_task(go_on()) if urls else None
    try:
        yield times
    finally:
        if scraping is not None:
            scraping.cancel()
            await asyncio.wait({scraping})
    if scraping is not None and not scraping.cancelled():
        scraping.result()


def _prompts(seed: str, count: int, args: argparse.Namespace) -> Iterator[str]:
    """Text, so that the tokenizer has its part; each its own from the first letter on."""
    draw = random.Random(seed)
    for _ in range(count):
        words = ("".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(args.words))
        yield " ".join(words)


async def _drive(address: str, prompts: Iterator[str], args: argparse.Namespace) -> int:
    """Runs the requests, so many at a time; how many tokens came. Raises BatonError."""
    tokens = 0
    async with open_channel(address) as channel:
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


def _figures(pairs: list[tuple[Side, Side]], requests: int) -> list[Result]:
    found = ratio([(on.token_us, off.token_us) for on, off in pairs])

    def percent(value: float) -> float:
        return 100 * (value - 1)

    def beside(name: str, on: list[float], off: list[float]) -> Result:
        pair = ratio(list(zip(on, off, strict=True)))
        return Result(name, fmean(on), "us", fmean(off), pair.mean)

    results = [
        beside(
            "CPU a token, all processes",
            [on.token_us for on, _ in pairs],
            [off.token_us for _, off in pairs],
        ),
        Result("what tracing and metrics add", percent(found.mean), "%"),
        Result("lower end of its 95 % interval", percent(found.low), "%"),
        at_most("upper end of its 95 % interval", percent(found.high), "%", MOST_PERCENT),
    ]
    results += [
        beside(
            f"CPU a token, {role}",
            [on.spent_us[role] for on, _ in pairs],
            [off.spent_us[role] for _, off in pairs],
        )
        for role in pairs[0][0].spent_us
    ]
    spans = fmean(on.spans for on, _ in pairs) / requests
    scrapes = fmean(on.scrapes for on, _ in pairs)
    return [
        *results,
        Result("spans received of a request", spans, ""),
        Result("scrapes of each process, of a pair", scrapes, ""),
    ]
