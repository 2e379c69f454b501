"""`baton bench tracing`: the cost of tracing and metrics, in CPU time of all five processes.

A pair is two freshly started Batons that get the same requests at the same time, so that changes in
the machine's speed affect both. In one, every request is traced to a receiver and all metrics are
scraped; in the other, neither. Only the five processes count, not the receiver, the client and the
scraper.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from baton_loadtest.bench.options import MODEL, TRANSPORT, option
from baton_loadtest.child import answer
from baton_loadtest.drive import answers
from baton_loadtest.launch import Peer, RunningBaton, check_cpu_clock, cores, fleet, peer, say
from baton_loadtest.report import Report, Result, at_most
from batonlm.cli.layout import APART, Layout, UpOptions
from batonlm.cli.ports import HOST
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.rpc.channels import bind

PLOTS = False
OPTIONS = (
    MODEL,
    TRANSPORT,
    option("--pairs", 10, "interleaved, 2 to 31"),
    option("--requests", 64, "of each side"),
    option("--concurrency", 4, "of each side"),
    option("--words", 64, "of a prompt"),
    option("--output-tokens", 64),
)

MOST_PERCENT = 3.0
SCRAPE_EVERY_S = 15.0
"""The interval of the chart's monitors."""

SETTLE_S = 6.0
"""After the last token; spans are exported within it."""

T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for 95 % intervals, by degrees of freedom from 1 on."""

MOST_PAIRS = len(T95) + 1


@dataclass(frozen=True, slots=True)
class Ratio:
    """A pair's mean ratio, and its 95 % interval."""

    mean: float
    low: float
    high: float


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Returns the ratio of the first to the second value of a pair; all are above 0.

    It uses logarithms, so that a ratio of 2 and one of 1/2 cancel out. Raises InvalidArgument for
    fewer than two pairs, or more than MOST_PAIRS.
    """
    check_pairs(len(pairs))
    logs = [log(first / second) for first, second in pairs]
    mean = fmean(logs)
    spread = T95[len(logs) - 2] * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(mean), exp(mean - spread), exp(mean + spread))


def check_pairs(pairs: int) -> None:
    """Raises InvalidArgument for a number of pairs that `ratio` does not support."""
    if not 2 <= pairs <= MOST_PAIRS:
        raise InvalidArgument(f"must be 2 to {MOST_PAIRS}", field="pairs")


SpentUs = dict[str, float]
"""Microseconds of CPU time per token, by role."""


@dataclass(frozen=True, slots=True)
class TracedPair:
    """Two Batons that got the same requests."""

    on: SpentUs
    """Traced and scraped."""
    off: SpentUs
    spans: int
    """Number of received spans."""
    scrapes: int
    """Number of scrapes of all processes."""


def measure(args: argparse.Namespace) -> Report:
    """Raises InvalidArgument; BatonError if a request is not answered in full, or not traced."""
    check_cpu_clock()
    check_pairs(args.pairs)
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    pairs = []
    options = UpOptions(
        model=args.model,
        local_prefill_tokens=APART,
        transport=args.transport,
        threads=1,
        engine_cpus=str(cores()[0]),
        other_cpus=str(cores()[-1]),
    )
    async with peer(receive_spans, cores()[-1]) as receiver:
        endpoint = (await receiver.ask(do="open"))["endpoint"]
        for number in range(args.pairs):
            async with (
                fleet(options, change=_traced_to(endpoint)) as on,
                fleet(options, change=_traced_to("")) as off,
            ):
                pairs.append(await _pair(args, number, on, off, receiver))
            sums = [sum(side.values()) for side in (pairs[-1].on, pairs[-1].off)]
            say(
                f"pair {number + 1} of {args.pairs}: {sums[0]:.0f} against {sums[1]:.0f} us a token"
            )
    return figures(pairs, args.requests)


def _traced_to(endpoint: str) -> Callable[[Layout], Layout]:
    flags = ("--otlp-endpoint", endpoint, "--trace-sample-share", "1")
    return lambda layout: replace(
        layout,
        processes=tuple(
            replace(spec, command=(*spec.command, *flags)) for spec in layout.processes
        ),
    )


async def _pair(
    args: argparse.Namespace, number: int, on: RunningBaton, off: RunningBaton, receiver: Peer
) -> TracedPair:
    for side in (on, off):
        await _drive(side, _prompts(f"warm {number}", args.concurrency, args), args)
    await asyncio.sleep(SETTLE_S)
    await receiver.ask(do="take")
    before = on.spent_s(), off.spent_s()
    async with _scraped(on) as scrapes:
        prompts = _prompts(f"{args.seed} {number}", args.requests, args)
        await asyncio.gather(*(_drive(side, prompts, args) for side in (on, off)))
        await asyncio.sleep(SETTLE_S)
    tokens = args.requests * args.output_tokens
    traced, plain = [
        {
            name.rpartition("-")[0]: 1e6 * (spent - first[name]) / tokens
            for name, spent in after.items()
        }
        for first, after in zip(before, (on.spent_s(), off.spent_s()), strict=True)
    ]
    found = await receiver.ask(do="take")
    if found["traces"] != args.requests:
        raise BatonError(f"{found['traces']} of {args.requests} requests were traced")
    return TracedPair(traced, plain, found["spans"], len(scrapes))


async def _drive(side: RunningBaton, prompts: list[str], args: argparse.Namespace) -> None:
    """Runs the requests, a number at a time. Raises BatonError if tokens are missing."""
    samples = await answers(side.layout.grpc, prompts, args.output_tokens, args.concurrency)
    if any(sample.tokens != args.output_tokens for sample in samples):
        raise BatonError("a request was not answered with all its tokens")


@asynccontextmanager
async def _scraped(side: RunningBaton) -> AsyncIterator[list[float]]:
    """Scrapes all processes repeatedly, as Prometheus does; yields the list of times."""
    clock = asyncio.get_running_loop().time
    times: list[float] = []

    async def go_on() -> None:
        while True:
            times.append(clock())
            for spec in side.layout.processes:
                await side.metrics(spec.name)
            await asyncio.sleep(max(0.0, times[-1] + SCRAPE_EVERY_S - clock()))

    scraping = asyncio.create_task(go_on())
    try:
        yield times
    finally:
        scraping.cancel()
        await asyncio.wait({scraping})
    if not scraping.cancelled():
        scraping.result()


def _prompts(seed: str, count: int, args: argparse.Namespace) -> list[str]:
    """Returns texts, so that the tokenizer is used; each differs from the first letter on."""
    draw = random.Random(seed)
    return [
        " ".join("".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(args.words))
        for _ in range(count)
    ]


def figures(pairs: list[TracedPair], requests: int) -> list[Result]:
    def beside(name: str, of: Callable[[SpentUs], float]) -> Result:
        both = [(of(pair.on), of(pair.off)) for pair in pairs]
        on, off = (fmean(side) for side in zip(*both, strict=True))
        return Result(name, on, "us", off, ratio(both).mean)

    found = ratio([(sum(pair.on.values()), sum(pair.off.values())) for pair in pairs])
    mean, low, high = (100 * (value - 1) for value in (found.mean, found.low, found.high))
    return [
        beside("CPU a token, all processes", lambda spent: sum(spent.values())),
        Result("what tracing and metrics add", mean, "%"),
        Result("lower end of its 95 % interval", low, "%"),
        at_most("upper end of its 95 % interval", high, "%", MOST_PERCENT),
        *(
            beside(f"CPU a token, {role}", lambda spent, role=role: spent[role])  # type: ignore[misc]  # mypy does not infer a default's type
            for role in pairs[0].on
        ),
        Result("spans received of a request", fmean(p.spans for p in pairs) / requests, ""),
        Result("scrapes of each process, of a pair", fmean(p.scrapes for p in pairs), ""),
    ]


async def receive_spans() -> None:
    """An OTLP receiver in its own process, so that its CPU time is not measured.

    do="open" is answered with its endpoint, other commands with the number of spans and traces
    received since the last one.
    """
    receiver = _SpanReceiver()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    endpoint = f"http://{HOST}:{bind(server, f'{HOST}:0')}"
    await server.start()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        return {"endpoint": endpoint} if command["do"] == "open" else receiver.take()

    try:
        await answer(handle)
    finally:
        await server.stop(0)


class _SpanReceiver(TraceServiceServicer):
    def __init__(self) -> None:
        self._spans = 0
        self._traces: set[bytes] = set()

    async def Export(
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self._spans += len(scope.spans)
                self._traces.update(span.trace_id for span in scope.spans)
        return ExportTraceServiceResponse()

    def take(self) -> dict[str, Any]:
        found = {"spans": self._spans, "traces": len(self._traces)}
        self._spans, self._traces = 0, set()
        return found
