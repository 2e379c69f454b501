"""`baton bench split`: checks the answers of `baton plan split` on this machine.

For each of three workloads the plan predicts the goodput of two workers, aggregated and split, from
running workers' own measurements. Then both set-ups really run, each with the chunks of the plan,
and the highest rate that they sustain is searched with the same requests.

All of Baton is real, but engines without a model only sleep for their time, as a host waits for its
device. Two engines that compute on a machine of two cores would take each other's time: the length
of a step would depend on the other worker, and could not be predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import SHAPES, option
from baton_loadtest.bench.reality import ONLY, started
from baton_loadtest.drive import Workload
from baton_loadtest.launch import say
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from baton_loadtest.load.search import Range, Verdict, highest
from baton_loadtest.planner.fleet import Targets
from baton_loadtest.planner.measured import calibration_of
from baton_loadtest.planner.split import SHARE, Advice, Answer, Carried, Splitting, of_100
from baton_loadtest.report import Report, Result, compared, quantile
from baton_loadtest.simulator.calibration import Calibration
from baton_loadtest.simulator.traffic import drawn_requests
from batonlm.cli.layout import UpOptions
from batonlm.core.routing.routing import RoutingPolicy

PLOTS = False
OPTIONS = (
    option(
        "--shape",
        "",
        f"a model that engines compute: {SHAPES}; without one they only take their time",
    ),
    option("--error", 15.0, "as `baton plan split` has it", metavar="PERCENT"),
    ONLY,
)

WORKERS = 2
REQUESTS = 120
IN_TIME = 0.9
"""The share of requests, and of times between tokens, that must be within targets. On two shared
cores one token in a hundred is later than any target allows."""

STEP = 1.15
"""Factor between tried rates: by default as large as the error of the plan."""

CLOSE = 0.16
"""No rate is tried between two that are a step apart."""

FARTHEST = 2.0
"""Rates are tried up to this multiple of the predicted one, and down to its inverse."""

TAKES = ("--fake-step-ms", "60", "--fake-token-ms", "0.3", "--max-running", "32")
"""A prompt of 200 tokens takes about as long as a step, as for an 8 B model on a large GPU. The
times are long, and concurrent sequences few, so that the host's own work is negligible."""

WARM = ((64, 8, 1.0), (512, 16, 1.0), (200, 64, 2.0))
"""Prompt tokens, output tokens and requests per second of the loads with which a worker measures
its speed: steps of several sizes."""

WARM_S = 12.0

LONE = Drawn(Arrivals(Kind.CONSTANT, 1 / 8.0, 40.0), fixed(32, 100))
"""Requests one after another, whose tokens would come evenly if only the engine took time."""


@dataclass(frozen=True, slots=True)
class SplitCase:
    """One workload."""

    name: str
    prompt: int
    """Tokens of each prompt."""
    output: int
    """Tokens of each answer."""
    first: float
    """Target of the first token, as a multiple of a lone worker's time for the prompt."""
    between: float
    """Target between tokens, as a multiple of a worker's step of one sequence."""

    def drawn(self, rate: float) -> Drawn:
        return Drawn(Arrivals(Kind.POISSON, rate, REQUESTS / rate), fixed(self.prompt, self.output))

    def targets(self, measured: Calibration) -> Targets:
        prefill, decode = measured.prefill.speed, measured.decode.speed
        return Targets(
            self.first * prefill.prefill_s(0, self.prompt),
            self.between * decode.decode_s(1, self.prompt),
        )


CASES = (
    SplitCase("long prompts", 1024, 200, 6.0, 1.6),
    SplitCase("prompts of middling length", 512, 100, 2.4, 2.8),
    SplitCase("short prompts", 32, 200, 20.0, 3.0),
)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The plan's answer for one workload, and real runs."""

    case: SplitCase
    targets: Targets
    advice: Advice
    split: float
    """Requests per second that the split set-up really sustained."""
    aggregated: float

    @property
    def ratio(self) -> float | None:
        """None if aggregated workers sustain none of the tried rates."""
        return self.split / self.aggregated if self.aggregated else None

    @property
    def answer(self) -> Answer | None:
        """The answer of the real runs by the plan's own rule; None if neither set-up sustained a
        rate."""
        if not (self.split or self.aggregated):
            return None
        return self.advice.answer_of(inf if self.ratio is None else self.ratio)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError."""
    with tempfile.TemporaryDirectory() as empty:
        options = UpOptions(runner="fake", engine_flags=TAKES)
        if args.shape:
            model = engines.with_tokenizer(engines.folder(args.shape), Path(empty))
            options = UpOptions(model=str(model))
        measured, added_s = asyncio.run(_measured(options))
        results = [Result("added on the way to a client, to 1 token of 10", 1000 * added_s, "ms")]
        for case in CASES:
            if args.only in case.name:
                results += _results(_confirmed(args, options, case, measured, added_s))
    return Report(results)


async def _measured(options: UpOptions) -> tuple[Calibration, float]:
    """Returns the speeds of workers of both roles, and of one that does both, because a decode
    worker that never prefills cannot measure prefill; and the seconds by which 1 of 10 tokens of a
    lone request is late."""
    gaps: Sequence[float] = ()
    speeds = []
    for prefills, decodes in ((1, 1), (0, 1)):
        say(f"measuring speeds with {prefills} prefill and {decodes} decode workers")
        async with started(replace(options, prefill=prefills, decode=decodes)) as real:
            for seed, (prompt, output, rate) in enumerate(WARM):
                arrivals = Arrivals(Kind.POISSON, rate, WARM_S)
                await real.run(Drawn(arrivals, fixed(prompt, output)).workload(seed), seed)
            speeds += await real.speeds()
            if not prefills:
                gaps = (await real.run(LONE.workload(-2), -2)).latencies.between
    return calibration_of(speeds), quantile(gaps, IN_TIME) - quantile(gaps, 0.5)


def _confirmed(
    args: argparse.Namespace,
    options: UpOptions,
    case: SplitCase,
    measured: Calibration,
    added_s: float,
) -> Confirmed:
    planned = case.targets(measured)
    # The plan covers engines only. A machine with shared cores may add more than a step.
    targets = Targets(planned.first_token_s + added_s, planned.between_tokens_s + added_s)
    workload = case.drawn(1.0).workload(args.seed)
    requests = drawn_requests(workload)
    splitting = Splitting(measured, requests, planned, RoutingPolicy(), share=IN_TIME)
    advice = splitting.advise(WORKERS, args.error / 100)
    say(f"{case.name}: {advice.answer} (predicted {advice.ratio:.2f})")
    split, whole = [
        asyncio.run(_carried(options, case, targets, workload, each))
        for each in (advice.split, advice.aggregated)
    ]
    return Confirmed(case, targets, advice, split, whole)


async def _carried(
    options: UpOptions, case: SplitCase, targets: Targets, workload: Workload, predicted: Carried
) -> float:
    """Returns the highest tried rate, in requests per second, that is sustained; 0: none."""
    setup = predicted.setup
    options = replace(
        options,
        prefill=setup.prefills,
        decode=setup.decodes,
        decode_flags=("--step-tokens", str(setup.step_tokens)),
    )
    own_rate = workload.requests / workload.seconds
    first = predicted.goodput or own_rate
    seeds = count()
    async with started(options) as real:
        # Until the workers have measured their speeds, which the routers use.
        few = Drawn(Arrivals(Kind.POISSON, 1.0, WARM_S), fixed(case.prompt, case.output))
        await real.run(few.workload(-1), -1)

        async def probe(rate: float) -> Verdict:
            found = await real.run(_faster(workload, rate / own_rate), next(seeds))
            first_s = quantile(found.latencies.first, IN_TIME)
            between_s = quantile(found.latencies.between, IN_TIME)
            # See `Splitting`.
            is_good = (
                found.answered >= SHARE * found.due
                and first_s <= targets.first_token_s
                and between_s <= targets.between_tokens_s
            )
            say(
                f"{case.name}: {setup.name}, {rate:.3g}/s: {'carried' if is_good else 'too much'}, "
                f"{of_100(IN_TIME)} within {1000 * first_s:.0f} and {1000 * between_s:.1f} ms, "
                f"{found.answered} of {found.due} answered"
            )
            return Verdict.WELL if is_good else Verdict.BADLY

        bounds = Range(first / FARTHEST, first * FARTHEST, CLOSE, first, growth=STEP)
        return (await highest(bounds, probe)).rate or 0.0


def _faster(workload: Workload, times: float) -> Workload:
    """Returns the same requests, `times` as fast."""
    sessions = tuple(replace(one, due_s=one.due_s / times) for one in workload.sessions)
    return Workload(sessions, workload.seconds / times)


def _results(found: Confirmed) -> Sequence[Result]:
    name, advice = found.case.name, found.advice
    carried = []
    for one, real in ((advice.split, found.split), (advice.aggregated, found.aggregated)):
        predicted = one.goodput or 0.0
        figure = f"{name}: {one.setup.name} carries, foretold"
        ratio = predicted / real if real else None
        carried.append(Result(figure, predicted, "requests/s", real, ratio))
    agrees = advice.answer is found.answer
    return [
        Result(f"{name}: first token, target", 1000 * found.targets.first_token_s, "ms"),
        Result(f"{name}: between tokens, target", 1000 * found.targets.between_tokens_s, "ms"),
        *carried,
        Result(f"{name}: split to aggregated, foretold", advice.ratio, "", found.ratio),
        compared(f"{name}: {advice.answer}; runs say the same", int(agrees), "", 1, 1),
    ]
