"""`baton bench reality`: the simulator's predictions against a real Baton on this machine.

For each of five workloads a Baton is started and gets requests until its workers have measured
their speed. Then, several times, their measurements are read, requests are simulated, and then
really sent. A machine's speed changes from minute to minute, so each prediction uses the speed just
before. Latencies are compared as clients see them. The time that router, tokenizer and detokenizer
add to a first token, which the simulator assumes to be constant, is measured first with lone
requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import SHAPES, option
from baton_loadtest.drive import (
    ORDINARY,
    GrpcLoadClient,
    OpenLoop,
    TokenIds,
    Workload,
    tokens_per_second,
)
from baton_loadtest.launch import ENGINE_CORE, OTHER_CORE, RunningBaton, fleet, say
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, Lengths, fixed, named
from baton_loadtest.load.summary import Objectives, Summary
from baton_loadtest.planner.measured import MeasuredSpeed, ask, calibration_of
from baton_loadtest.report import Report, Result, at_most, compared, ms
from baton_loadtest.simulator.settings import Delays, FleetFacts
from baton_loadtest.simulator.simulation import simulate
from baton_loadtest.simulator.summary import Summary as Predicted
from baton_loadtest.simulator.summary import summary
from baton_loadtest.simulator.traffic import drawn_requests
from batonlm.cli.access import Access
from batonlm.cli.layout import ENGINE_ROLES, UpOptions
from batonlm.core.errors import BatonError

PLOTS = False
ONLY = option("--only", "", "workloads with this in it", metavar="NAME")
OPTIONS = (
    option("--shape", "8m", SHAPES),
    option("--rounds", 5, "real runs of each workload"),
    option("--seconds", 40.0, "of each run"),
    option("--warm-s", 20.0, "before, twice"),
    option("--busy", 0.5, "share of its time that the busiest worker is to work"),
    ONLY,
)

KV_MIB = 2048
"""Of each engine: enough for all concurrent requests, whatever else the machine's memory holds."""

ALONE = 20
"""Number of lone requests that measure the time added to a first token."""

ALONE_S = 0.5
MOST_TOKENS = 2048
CLOSE, CLOSE_TAIL = 15.0, 30.0
"""Maximum error in percent of a median or a rate, and of a 99th percentile."""


@dataclass(frozen=True, slots=True)
class RealityCase:
    """One workload, and the fleet for it."""

    name: str
    lengths: Lengths
    scale: float = 1.0
    """A factor of the lengths."""
    prefills: int = 0
    """Prefill workers; 0: decode workers prefill."""
    shared_tokens: int = 0
    bursts: bool = False
    """Three times the rate for a quarter of the time, and a third of it otherwise."""

    def drawn(self, rate: float, seconds: float) -> Drawn:
        arrivals = Arrivals(Kind.POISSON, rate, seconds)
        if self.bursts:
            arrivals = Arrivals(
                Kind.BURSTS, rate / 3, seconds, burst_rate=3 * rate, burst_s=5.0, period_s=20.0
            )
        return Drawn(
            arrivals, self.lengths, self.scale, MOST_TOKENS, self.shared_tokens, shared_groups=4
        )


CASES = (
    RealityCase("even", fixed(128, 32)),
    RealityCase("chat", named("chat"), 0.2),
    RealityCase("code", named("code"), 0.2),
    RealityCase(
        "chat in bursts, shared beginnings", named("chat"), 0.1, shared_tokens=256, bursts=True
    ),
    RealityCase("chat, prefill apart", named("chat"), 0.2, prefills=1),
)


FIGURES = {
    "first token, p50": ("ms", CLOSE),
    "first token, p99": ("ms", CLOSE_TAIL),
    "between tokens, p50": ("ms", CLOSE),
    "between tokens, p99": ("ms", CLOSE_TAIL),
    "output tokens": ("/s", CLOSE),
}
"""The compared figures: the unit, and the maximum error of a prediction in percent."""

RealFigures = tuple[float, float, float, float, float]
"""The values of FIGURES, in their order."""


class RealBaton:
    """A real Baton to compare predictions with."""

    def __init__(self, running: RunningBaton, client: GrpcLoadClient) -> None:
        self._running, self._client = running, client

    async def speeds(self) -> list[MeasuredSpeed]:
        """Returns each engine's own measurements. Raises BatonError."""
        layout = self._running.layout
        addresses = [spec.grpc for spec in layout.processes if spec.role in ENGINE_ROLES]
        return await ask(addresses, None, layout.peer_token)

    async def run(self, workload: Workload, seed: int) -> Summary:
        """seed: of the tokens, so that runs do not share cached prefixes."""
        loop = OpenLoop(self._client, TokenIds(seed, *ORDINARY))
        return Summary(await loop.run(workload), Objectives())


@asynccontextmanager
async def started(options: UpOptions) -> AsyncIterator[RealBaton]:
    """options: what to run, without addresses. Raises StartFailed.

    A single engine has its own core, and everything else the other. Two engines share both cores
    with the rest: on one core they would alternate, which no prediction takes into account.
    """
    alone = options.prefill + options.decode == 1
    both = f"{ENGINE_CORE},{OTHER_CORE}"
    os.sched_setaffinity(0, {int(core) for core in (OTHER_CORE if alone else both).split(",")})
    options = replace(
        options,
        threads=1,
        kv_memory_mib=KV_MIB,
        engine_cpus=ENGINE_CORE if alone else both,
        other_cpus=OTHER_CORE if alone else both,
    )
    async with (
        fleet(options) as running,
        GrpcLoadClient(Access(running.layout.grpc)) as client,
    ):
        yield RealBaton(running, client)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if a request fails."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as place:
        folder = str(engines.with_tokenizer(engines.folder(args.shape), Path(place)))
        for case in CASES:
            if args.only in case.name:
                say(f"{case.name}: starting a Baton")
                results += asyncio.run(_case(args, folder, case))
    return Report(results)


async def _case(args: argparse.Namespace, folder: str, case: RealityCase) -> list[Result]:
    async with started(UpOptions(model=folder, prefill=case.prefills)) as real:
        return await _compared(args, case, real)


async def _compared(args: argparse.Namespace, case: RealityCase, real: RealBaton) -> list[Result]:
    seed = args.seed
    lone = Drawn(Arrivals(Kind.CONSTANT, 1 / ALONE_S, ALONE * ALONE_S), fixed(64, 8)).workload(0)
    await _measured(real, case.drawn(1.0, args.warm_s).workload(seed + 1), seed + 1)
    rate = args.busy / _busy(await _facts(case, real), case, seed)
    await _measured(real, case.drawn(rate, args.warm_s).workload(seed + 2), seed + 2)
    facts = await _facts(case, real)
    really_ms, predicted_ms = (await _measured(real, lone, seed + 3))[0], _predicted(facts, lone)[0]
    delays = Delays(tokenize_s=max(0.0, really_ms - predicted_ms) / 1000)

    workload = case.drawn(rate, args.seconds).workload(seed)
    predictions, runs = [], []
    for number in range(args.rounds):
        say(f"{case.name}: {workload.requests} requests, {number + 1} of {args.rounds}")
        facts = replace(await _facts(case, real), delays=delays)
        predictions.append(_predicted(facts, workload))
        runs.append(await _measured(real, workload, seed + 10 + number))
    results = [
        Result(f"{case.name}: requests", workload.requests, ""),
        Result(f"{case.name}: rate", rate, "/s"),
        Result(f"{case.name}: added to a first token", 1000 * delays.tokenize_s, "ms"),
    ]
    for number, name in enumerate(FIGURES):
        predicted, really = ([one[number] for one in each] for each in (predictions, runs))
        results += _figure(f"{case.name}: {name}", *FIGURES[name], predicted, really)
    return results


def _figure(
    name: str, unit: str, close: float, predicted: Sequence[float], real: Sequence[float]
) -> list[Result]:
    """Compares the median prediction with the median run. The error of a tail is 0 if the
    prediction is within the range of the runs."""
    middle = median(predicted)
    off = 100 * abs(middle / median(real) - 1)
    if close == CLOSE_TAIL and min(real) <= middle <= max(real):
        off = 0.0
    return [
        compared(f"{name}, foretold", middle, unit, median(real)),
        Result(f"{name}, least and most of the runs", min(real), unit, max(real)),
        at_most(f"{name}, off by", off, "%", close),
    ]


async def _measured(real: RealBaton, workload: Workload, seed: int) -> RealFigures:
    """Raises BatonError if a request is not answered."""
    found = await real.run(workload, seed)
    if found.answered != found.due:
        raise BatonError(f"{found.due - found.answered} of {found.due} requests were not answered")
    first, between = found.latencies.first, found.latencies.between
    return (
        *(ms(first, 0.5), ms(first, 0.99), ms(between, 0.5), ms(between, 0.99)),
        tokens_per_second(found.run.samples),
    )


async def _facts(case: RealityCase, real: RealBaton) -> FleetFacts:
    """Returns the fleet with its workers' current measurements."""
    known = calibration_of(await real.speeds())
    return FleetFacts(
        known.prefill, known.decode, case.prefills, 1, known.kv_bytes, known.max_model_len
    )


def _simulated(facts: FleetFacts, workload: Workload) -> Predicted:
    return summary(facts, simulate(facts, drawn_requests(workload)))


def _predicted(facts: FleetFacts, workload: Workload) -> RealFigures:
    found = _simulated(facts, workload)
    first, between = found.first_token_s, found.token_s
    return (
        *(1000 * first[0.5], 1000 * first[0.99], 1000 * between[0.5], 1000 * between[0.99]),
        found.output_tokens / found.window_s,
    )


def _busy(facts: FleetFacts, case: RealityCase, seed: int) -> float:
    """Returns the share of time that the busiest worker needs for one request per second."""
    slow = case.drawn(0.02, 5000.0).workload(seed)
    found = _simulated(facts, slow)
    return max(found.decode_busy + found.prefill_busy) * found.window_s / slow.requests
