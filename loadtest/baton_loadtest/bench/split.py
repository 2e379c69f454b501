"""`baton bench split`: whether `baton plan split` is right, on this machine.

For each of three workloads it says what two workers carry within targets, aggregated and split,
from what running ones measured of themselves. Then both set-ups really run, each with the chunks
that the plan gave it, and the highest rate that they carry is looked for with the same requests.

All of Baton is real, but without a model the engines only take their time, asleep, as a host waits
for its device. Two engines that compute on a machine of two cores take each other's time: a step's
length is then no worker's own, and nothing could be foretold from it.
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

from baton.cli.layout import UpOptions
from baton.core.routing.routing import RoutingPolicy
from baton_loadtest.bench import engines
from baton_loadtest.bench.options import SHAPES, option
from baton_loadtest.bench.reality import ONLY, RealBaton, started
from baton_loadtest.drive import Workload
from baton_loadtest.launch import say
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from baton_loadtest.load.search import Range, Verdict, highest
from baton_loadtest.load.summary import Summary
from baton_loadtest.planner.fleet import Targets
from baton_loadtest.planner.measured import calibration_of
from baton_loadtest.planner.split import SHARE, Advice, Answer, Carried, Splitting, of_100
from baton_loadtest.report import Report, Result, compared, quantile
from baton_loadtest.simulator.calibration import Calibration
from baton_loadtest.simulator.traffic import drawn_requests

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
OF = 0.9
"""Requests and times between tokens that are to be in time. Two cores that are shared with others
keep one token in a hundred for longer than any target leaves room for."""

STEP = 1.15
"""From one rate that is tried to the next: by default as much as the error of the plan."""

CLOSE = 0.16
"""Nothing is tried between two rates that are a step apart."""

FARTHEST = 2.0
"""So many times more than is foretold is tried at most, or less."""

TAKES = ("--fake-step-ms", "60", "--fake-token-ms", "0.3", "--max-running", "32")
"""A prompt of 200 tokens takes about as long as a step, as it does where an 8 B model runs on a
large GPU. Slow enough, and few enough at a time, that what the host does beside it is little."""

WARM = ((64, 8, 1.0), (512, 16, 1.0), (200, 64, 2.0))
"""Prompts, answers and how many a second, before a worker is asked how fast it is: steps of several
sizes."""

WARM_S = 12.0

LONE = Drawn(Arrivals(Kind.CONSTANT, 1 / 8.0, 40.0), fixed(32, 100))
"""Requests one after the other, whose tokens would come evenly if nothing but an engine took time.
"""


@dataclass(frozen=True, slots=True)
class SplitCase:
    """prompt, output: tokens. first, between: the targets, in times that a worker alone would need
    for the prompt, and for a step of one sequence."""

    name: str
    prompt: int
    output: int
    first: float
    between: float

    def drawn(self, rate: float) -> Drawn:
        return Drawn(Arrivals(Kind.POISSON, rate, REQUESTS / rate), fixed(self.prompt, self.output))

    def targets(self, known: Calibration) -> Targets:
        prefill, decode = known.prefill.speed, known.decode.speed
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
    case: SplitCase
    targets: Targets
    advice: Advice
    split: float
    aggregated: float

    @property
    def ratio(self) -> float | None:
        """None: aggregated workers carry none of the rates that were tried."""
        return self.split / self.aggregated if self.aggregated else None

    @property
    def answer(self) -> Answer | None:
        """What the real runs say, by the plan's own rule; None where nothing was carried at all,
        which says nothing."""
        if not (self.split or self.aggregated):
            return None
        return self.advice.answer_of(inf if self.ratio is None else self.ratio)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as place:
        ask = _asked(args.shape, Path(place))
        known, added_s = asyncio.run(_known(ask))
        results.append(
            Result("added on the way to a client, to 1 token of 10", 1000 * added_s, "ms")
        )
        for case in CASES:
            if args.only in case.name:
                results += _results(_confirmed(args, ask, case, known, added_s))
    return Report(results)


def _asked(shape: str, place: Path) -> UpOptions:
    """place: an empty folder."""
    if not shape:
        return UpOptions(runner="fake", engine_flags=TAKES)
    return UpOptions(model=str(engines.with_tokenizer(engines.folder(shape), place)))


async def _known(ask: UpOptions) -> tuple[Calibration, float]:
    """Of workers of both roles, and of one that does both: a decode worker that never prefills
    cannot know what that takes. And by how many seconds 1 of 10 tokens of a lone request is late.
    """
    gaps: Sequence[float] = ()
    told = []
    for prefills, decodes in ((1, 1), (0, 1)):
        say(f"measuring speeds with {prefills} prefill and {decodes} decode workers")
        async with started(replace(ask, prefill=prefills, decode=decodes)) as real:
            for seed, (prompt, output, rate) in enumerate(WARM):
                arrivals = Arrivals(Kind.POISSON, rate, WARM_S)
                await real.run(Drawn(arrivals, fixed(prompt, output)).workload(seed), seed)
            told += await real.speeds()
            if not prefills:
                gaps = (await real.run(LONE.workload(-2), -2)).latencies.between
    return calibration_of(told), quantile(gaps, OF) - quantile(gaps, 0.5)


def _confirmed(
    args: argparse.Namespace, ask: UpOptions, case: SplitCase, known: Calibration, added_s: float
) -> Confirmed:
    asked = case.targets(known)
    # The plan knows engines. A machine whose cores are shared may well add more than a step.
    targets = Targets(asked.first_token_s + added_s, asked.between_tokens_s + added_s)
    workload = case.drawn(1.0).workload(args.seed)
    splitting = Splitting(known, drawn_requests(workload), asked, RoutingPolicy(), share=OF)
    advice = splitting.advise(WORKERS, args.error / 100)
    say(f"{case.name}: {advice.answer} (foretold {advice.ratio:.2f})")
    split, whole = [
        asyncio.run(_carried(ask, case, targets, workload, each))
        for each in (advice.split, advice.aggregated)
    ]
    return Confirmed(case, targets, advice, split, whole)


async def _carried(
    ask: UpOptions, case: SplitCase, targets: Targets, workload: Workload, foretold: Carried
) -> float:
    """The most requests a second of those tried that it really carries; 0: none of them."""
    setup = foretold.setup
    ask = replace(
        ask,
        prefill=setup.prefills,
        decode=setup.decodes,
        decode_flags=("--step-tokens", str(setup.step_tokens)),
    )
    own_rate = workload.requests / workload.seconds
    first = foretold.goodput or own_rate
    seeds = count()
    async with started(ask) as real:
        await _warm(real, case)

        async def probe(rate: float) -> Verdict:
            found = await real.run(_at(workload, rate / own_rate), next(seeds))
            is_good = _is_good(found, targets)
            said = "carried" if is_good else "too much"
            say(f"{case.name}: {setup.name}, {rate:.3g}/s: {said}, {_tails(found)}")
            return Verdict.WELL if is_good else Verdict.BADLY

        bounds = Range(first / FARTHEST, first * FARTHEST, CLOSE, first, growth=STEP)
        return (await highest(bounds, probe)).rate or 0.0


async def _warm(real: RealBaton, case: SplitCase) -> None:
    """Until workers have measured themselves, which routers go by."""
    few = Drawn(Arrivals(Kind.POISSON, 1.0, WARM_S), fixed(case.prompt, case.output))
    await real.run(few.workload(-1), -1)


def _at(workload: Workload, times: float) -> Workload:
    """The same requests, so many times as fast."""
    return Workload(
        tuple(replace(one, due_s=one.due_s / times) for one in workload.sessions),
        workload.seconds / times,
    )


def _is_good(found: Summary, targets: Targets) -> bool:
    """As `Splitting` has it."""
    first_s, between_s = _reached(found)
    return (
        found.answered >= SHARE * found.due
        and first_s <= targets.first_token_s
        and between_s <= targets.between_tokens_s
    )


def _reached(found: Summary) -> tuple[float, float]:
    """Seconds to a first token, and between two, that most are within."""
    return quantile(found.latencies.first, OF), quantile(found.latencies.between, OF)


def _tails(found: Summary) -> str:
    first_s, between_s = _reached(found)
    told = f"{of_100(OF)} within {1000 * first_s:.0f} and {1000 * between_s:.1f} ms"
    return f"{told}, {found.answered} of {found.due} answered"


def _results(found: Confirmed) -> Sequence[Result]:
    name, advice = found.case.name, found.advice
    real = {id(advice.split): found.split, id(advice.aggregated): found.aggregated}
    carried = []
    for one in (advice.split, advice.aggregated):
        said, goodput = one.goodput or 0.0, real[id(one)]
        carried.append(
            Result(
                f"{name}: {one.setup.name} carries, foretold",
                said,
                "requests/s",
                goodput,
                said / goodput if goodput else None,
            )
        )
    agrees = advice.answer is found.answer
    return [
        Result(f"{name}: first token, target", 1000 * found.targets.first_token_s, "ms"),
        Result(f"{name}: between tokens, target", 1000 * found.targets.between_tokens_s, "ms"),
        *carried,
        Result(f"{name}: split to aggregated, foretold", advice.ratio, "", found.ratio),
        compared(f"{name}: {advice.answer}; runs say the same", int(agrees), "", 1, 1),
    ]
