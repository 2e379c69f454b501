"""Decides whether to split workers into prefill and decode, by simulating the goodput of set-ups
with the same number of workers.

A set-up's goodput is the highest rate of the traffic at which 99 of 100 requests have their first
token in time, 99 of 100 times between tokens are short enough, and at most 1 of 100 requests is
refused. The share of 99 can be lowered to 90.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from baton_loadtest import SPEED, TRACE, report, scenario_file, traces
from baton_loadtest.load import scenario
from baton_loadtest.load.search import Range, Verdict, highest
from baton_loadtest.planner.curves import MeasuredDecode, MeasuredPrefill, duration
from baton_loadtest.planner.fleet import Targets
from baton_loadtest.planner.measured import add_calibrate, asked, calibration_of
from baton_loadtest.report import Result, compared
from baton_loadtest.simulator.calibration import Calibration, read_speeds
from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.settings import FleetFacts, RouterFacts, WorkerFacts
from baton_loadtest.simulator.simulation import simulate
from baton_loadtest.simulator.summary import Summary, summary
from baton_loadtest.simulator.traffic import Scale, drawn_requests, traced_requests
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import UNMEASURED
from batonlm.core.routing.routing import RoutingPolicy

SHARE = 0.99
LEAST_REQUESTS = 100
"""Fewer requests have no 99th percentile, and are few even for a share of 90 of 100."""

RESOLUTION = 0.05
MOST_TIMES = 1024.0
"""The highest factor by which traffic is sped up or slowed down."""

ALONE_S = 60.0
"""Seconds between two requests that are to run alone."""


class Answer(StrEnum):
    PAYS = "Splitting pays"
    DOES_NOT = "Splitting does not pay"
    WITHIN_ERROR = "The difference is less than the error of the model"


@dataclass(frozen=True, slots=True)
class Setup:
    """A number of workers in each role."""

    prefills: int
    """0: aggregated, decode workers also prefill."""
    decodes: int
    step_tokens: int
    """Maximum number of prompt tokens that a decode step computes."""

    @property
    def name(self) -> str:
        if self.prefills:
            return f"{self.prefills}P{self.decodes}D"
        return f"{self.decodes} aggregated, chunks of {self.step_tokens}"


@dataclass(frozen=True, slots=True)
class Carried:
    """The goodput of a set-up."""

    setup: Setup
    goodput: float | None
    """Requests per second; None: targets are missed even at a minimal rate."""
    found: Summary
    """The run at that rate, or at the minimal rate."""
    is_bounded: bool = False
    """No higher rate was tried."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The result for all set-ups."""

    carried: tuple[Carried, ...]
    split: Carried
    """The best split set-up."""
    aggregated: Carried
    """The best aggregated set-up."""
    error: float
    """Error of the simulation, as a share."""
    share: float
    """Share of requests, and of times between tokens, that must be in time."""

    @property
    def quantile(self) -> str:
        return f"p{100 * self.share:.0f}"

    @property
    def ratio(self) -> float:
        """Goodput of the best split set-up divided by that of the best aggregated one. Infinite if
        only a split meets the targets."""
        split, whole = self.split.goodput or 0.0, self.aggregated.goodput or 0.0
        return split / whole if whole else float("inf")

    @property
    def answer(self) -> Answer:
        return self.answer_of(self.ratio)

    def answer_of(self, ratio: float) -> Answer:
        """Returns the answer for another ratio."""
        if ratio > 1 + self.error:
            return Answer.PAYS
        return Answer.DOES_NOT if ratio < 1 / (1 + self.error) else Answer.WITHIN_ERROR


def setups(workers: int, decode: WorkerFacts, targets: Targets) -> list[Setup]:
    """Returns the set-ups to try, aggregated ones first: with decode steps as configured, and with
    prompt chunks that keep a step within the target, beside few rows and beside many, as
    `inter_token_ms` does. Raises InvalidArgument for too few workers."""
    if workers < 2:
        raise InvalidArgument("must be at least 2, to be split", field="workers")
    most = chunk(decode, targets.between_tokens_s)
    chunks = sorted({decode.step_tokens, most, _blocks(most // 2, decode.block_size)})
    return [
        *(Setup(0, workers, tokens) for tokens in chunks),
        *(Setup(prefills, workers - prefills, most) for prefills in range(1, workers)),
    ]


def chunk(decode: WorkerFacts, within_s: float) -> int:
    """Returns the prompt tokens, in whole blocks, that a decode step with one sequence computes
    within a time: at least one block, at most its configured number."""
    speed = decode.speed
    left_s = within_s - speed.decode_s(1, 0) - speed.prefill_step_s
    fit = decode.step_tokens
    if speed.prefill_position_s:
        fit = min(fit, int(left_s / speed.prefill_position_s))
    return _blocks(fit, decode.block_size)


def _blocks(tokens: int, block_size: int) -> int:
    return block_size * max(1, tokens // block_size)


def of_100(share: float) -> str:
    return f"{100 * share:.0f} of 100"


class Splitting:
    """Searches the goodput of set-ups. known: must have prefill curves. requests: in order of
    arrival, from 0 on. tried: called after each run. share: of requests, and of times between
    tokens, that must be in time: 0.9 or SHARE."""

    def __init__(
        self,
        known: Calibration,
        requests: Sequence[Request],
        targets: Targets,
        policy: RoutingPolicy,
        tried: Callable[[Setup, float, Summary], None] = lambda setup, rate, found: None,
        share: float = SHARE,
    ) -> None:
        """Raises InvalidArgument for too few requests."""
        if len(requests) < LEAST_REQUESTS:
            raise InvalidArgument(
                f"has {len(requests)} requests: it takes {LEAST_REQUESTS} to tell what "
                f"{of_100(share)} wait",
                field="trace",
            )
        self._known, self._requests, self._targets = known, requests, targets
        self._policy, self._tried, self._share = policy, tried, share
        span_s = requests[-1].arrival - requests[0].arrival
        if not span_s:
            raise InvalidArgument("all requests come at once", field="trace")
        self.rate = (len(requests) - 1) / span_s

    def span_s(self, rate: float) -> float:
        """Returns how long the traffic lasts at a rate."""
        return (len(self._requests) - 1) / rate

    def advise(self, workers: int, error: float) -> Advice:
        """error: of the simulation, as a share of goodput. Raises InvalidArgument with the target
        that no set-up meets."""
        carried: list[Carried] = []
        first = self.rate
        for setup in setups(workers, self._known.decode, self._targets):
            found = self._carried(setup, first)
            carried.append(found)
            # Other set-ups are probably similar: a search that begins there is short.
            first = found.goodput or first
        if all(one.goodput is None for one in carried):
            raise self._refusal(carried)

        def best(of: Iterator[Carried]) -> Carried:
            return max(of, key=lambda one: one.goodput or 0.0)

        return Advice(
            tuple(carried),
            best(one for one in carried if one.setup.prefills),
            best(one for one in carried if not one.setup.prefills),
            error,
            self._share,
        )

    def _carried(self, setup: Setup, first: float) -> Carried:
        apart = (
            replace(one, arrival=ALONE_S * number) for number, one in enumerate(self._requests)
        )
        found = self._run(setup, 1 / ALONE_S, apart)
        if not self._is_good(found):
            return Carried(setup, None, found)
        runs: dict[float, Summary] = {}

        async def probe(rate: float) -> Verdict:
            times = self.rate / rate
            faster = (replace(one, arrival=one.arrival * times) for one in self._requests)
            runs[rate] = self._run(setup, rate, faster)
            return Verdict.WELL if self._is_good(runs[rate]) else Verdict.BADLY

        least, most = self.rate / MOST_TIMES, self.rate * MOST_TIMES
        bounds = Range(least, most, RESOLUTION, min(max(first, least), most))
        result = asyncio.run(highest(bounds, probe))
        if result.rate is None:
            # Requests that all arrive at once do so at any rate.
            return Carried(setup, None, runs[least])
        return Carried(setup, result.rate, runs[result.rate], result.above is None)

    def _run(self, setup: Setup, rate: float, requests: Iterator[Request]) -> Summary:
        known = self._known
        facts = FleetFacts(
            known.prefill,
            replace(known.decode, step_tokens=setup.step_tokens),
            setup.prefills,
            setup.decodes,
            known.kv_bytes,
            known.max_model_len,
            RouterFacts(self._policy),
        )
        found = summary(facts, simulate(facts, requests))
        self._tried(setup, rate, found)
        return found

    def _is_good(self, found: Summary) -> bool:
        return (
            found.answered >= SHARE * found.requests
            and found.first_token_s[self._share] <= self._targets.first_token_s
            and found.token_s[self._share] <= self._targets.between_tokens_s
        )

    def _refusal(self, carried: Sequence[Carried]) -> InvalidArgument:
        """Returns what the nearest set-up reaches at a minimal rate, and how that is composed."""
        targets, known, of = self._targets, self._known, of_100(self._share)
        first_s, token_s = (
            min(getattr(one.found, name)[self._share] for one in carried)
            for name in ("first_token_s", "token_s")
        )
        if all(one.found.answered < SHARE * one.found.requests for one in carried):
            why = max(carried[0].found.refused, key=lambda name: carried[0].found.refused[name])
            return InvalidArgument(f"no set-up answers 99 of 100 requests: {why}", field="trace")
        if first_s > targets.first_token_s:
            lengths = sorted(one.input_tokens for one in self._requests)
            long = lengths[int(self._share * (len(lengths) - 1))]
            curve = MeasuredPrefill(known.prefill.reported)
            return InvalidArgument(
                f"cannot be met by any set-up: with next to no traffic, {of} first tokens "
                f"come within {duration(first_s)} at best. The prompt of {of}, {long} tokens, "
                f"takes {duration(curve.alone_s(0, long))} if nothing of it is cached",
                field="first_token_ms",
            )
        alone_s = MeasuredDecode(known.decode.speed).step_s(1, 0)
        return InvalidArgument(
            f"cannot be met by any set-up: with next to no traffic, {of} times between tokens "
            f"are within {duration(token_s)} at best. A step of one sequence takes "
            f"{duration(alone_s)} without any context",
            field="between_tokens_ms",
        )


def add_split_parser(kinds: Any) -> None:
    parser: argparse.ArgumentParser = kinds.add_parser(
        "split",
        help="whether to split workers into prefill and decode, for recorded traffic",
        description="Simulates as many workers aggregated and split in every way, and says which "
        "carries most of the traffic within the targets. See docs/planning.md.",
    )
    add = parser.add_argument
    add("--workers", type=int, required=True, metavar="N", help="of both roles together")
    asked = parser.add_argument_group("traffic")
    which = asked.add_mutually_exclusive_group()
    which.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Mooncake's JSON lines or Azure's CSV (default: two minutes of bundled traffic)",
    )
    which.add_argument(
        "--scenario",
        type=scenario_file,
        metavar="FILE.toml",
        help="of `baton loadtest`, with one turn each",
    )
    asked.add_argument("--skip-broken", action="store_true", help="broken lines of the trace")
    asked.add_argument(
        "--lengths", type=float, default=1.0, metavar="F",
        help="times the trace's tokens, a multiple of 0.125 (default 1)",
    )  # fmt: skip
    asked.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="of traffic (default: all)"
    )
    asked.add_argument("--seed", type=int, default=0, metavar="N", help="of a scenario")
    targets = parser.add_argument_group("targets")
    targets.add_argument("--first-token-ms", type=float, required=True, metavar="MS")
    targets.add_argument("--between-tokens-ms", type=float, required=True, metavar="MS")
    targets.add_argument(
        "--of-100", type=int, choices=(90, 99), default=99,
        help="how many of 100 requests, and times between tokens, are to be within (default 99)",
    )  # fmt: skip
    speed = parser.add_argument_group("what workers can do: one of the two")
    speed.add_argument(
        "--speed", type=Path, metavar="FILE.json",
        help="see docs/simulator.md (default: the bundled model on a core)",
    )  # fmt: skip
    add_calibrate(speed)
    add(
        "--local-prefill-tokens", type=int, default=-1, metavar="N",
        help="as the router's option (default -1: by speed)",
    )  # fmt: skip
    add(
        "--error", type=float, default=15.0, metavar="PERCENT",
        help="of goodput that set-ups have to differ by to be told apart (default %(default)g)",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the figures here")


RUNS = 12
"""Approximate number of runs per set-up."""

LONG_ENOUGH = 30.0
"""As a multiple of the first-token target: a growing queue shows only in longer traffic."""


def run(args: argparse.Namespace) -> int:
    """Raises InvalidArgument, also for a target that no set-up meets."""
    if not 0 <= args.error < 100:
        raise InvalidArgument("must be from 0 to below 100 percent", field="error")
    targets = Targets(args.first_token_ms / 1000, args.between_tokens_ms / 1000)
    known = _calibration(args)
    requests, left_out = _fitting(_requests(args), known)
    policy = RoutingPolicy(args.local_prefill_tokens)
    console = Console(highlight=False, soft_wrap=True)
    if left_out:
        console.print(
            f"{left_out} requests are longer than the model or a worker's KV, and left out."
        )
    with _bar() as progress:
        task = progress.add_task("", total=RUNS * args.workers)

        def tried(setup: Setup, rate: float, found: Summary) -> None:
            progress.update(task, advance=1, description=f"{setup.name} at {rate:.3g}/s")

        splitting = Splitting(known, requests, targets, policy, tried, args.of_100 / 100)
        advice = splitting.advise(args.workers, args.error / 100)
    console.print(_table(advice, args.workers))
    for text in explained(advice, splitting, targets):
        console.print(text, markup=False)
    if args.json:
        report.write(args.json, args.seed, _results(advice))
        print(f"written to {args.json}", file=sys.stderr)
    return 0


def explained(advice: Advice, splitting: Splitting, targets: Targets) -> list[str]:
    """Returns the answer in sentences, with notes for the reader."""
    split, whole = advice.split, advice.aggregated
    if split.goodput is None:
        found = ["Splitting does not pay: no split is in time even with next to no traffic."]
    elif whole.goodput is None:
        found = [
            f"Splitting pays: {split.setup.name} carries {split.goodput:.3g} requests/s, and "
            "without a split requests are not in time even with next to no traffic."
        ]
    else:
        compare = f"{split.setup.name} carries {split.goodput:.3g} requests/s within the targets, "
        compare += f"{whole.setup.name} {whole.goodput:.3g}"
        share = f"{100 * (advice.ratio - 1):+.0f} %"
        found = [f"{advice.answer}: {compare} ({share})."]
        if advice.answer is Answer.WITHIN_ERROR:
            found.append(
                f"Below {100 * advice.error:g} % the simulator cannot tell them apart. Fewer parts "
                "are easier to run: stay aggregated, or measure both with `baton loadtest`."
            )
    if any(one.is_bounded for one in (split, whole)):
        found.append("A set-up carries more than the fastest that was tried.")
    best = max(split.goodput or 0.0, whole.goodput or 0.0)
    lasts_s = splitting.span_s(best)
    if lasts_s < LONG_ENOUGH * targets.first_token_s:
        found.append(
            f"At that rate the traffic lasts {lasts_s:.3g} s only: longer traffic may carry less."
        )
    return found


def _calibration(args: argparse.Namespace) -> Calibration:
    """Returns speeds with prefill curves: those of decode workers if the file has none."""
    if args.speed and args.calibrate:
        raise InvalidArgument(
            "give a file of speeds, or --calibrate with running workers, not both", field="speed"
        )
    if args.calibrate:
        measured = asked(args)
        if not any(one.role == "prefill" for one in measured):
            raise InvalidArgument("names no prefill worker: it takes both", field="calibrate")
        return calibration_of(measured)
    known = read_speeds(args.speed or SPEED)
    if known.prefill.speed == UNMEASURED:
        known = replace(known, prefill=known.decode)
    return known


def _requests(args: argparse.Namespace) -> list[Request]:
    if args.scenario is None:
        found = traces.read(args.trace or TRACE, skip_broken=args.skip_broken)
        if found.broken:
            print(f"{len(found.broken)} broken lines were skipped", file=sys.stderr)
        return traced_requests(found.requests, Scale(1.0, args.lengths, 1, args.seconds))
    if args.lengths != 1.0:
        raise InvalidArgument("is for traces: a scenario says it itself", field="lengths")
    changes = scenario.Changes(seconds=args.seconds or None, skip_broken=args.skip_broken)
    return drawn_requests(scenario.read(args.scenario, changes).workload(args.seed))


def _fitting(requests: Sequence[Request], known: Calibration) -> tuple[list[Request], int]:
    """Returns the requests that every set-up can serve, and the number of others."""
    most = min(
        known.max_model_len,
        *(facts.num_blocks * facts.block_size for facts in (known.prefill, known.decode)),
    )
    fitting = [one for one in requests if one.input_tokens + one.output_tokens <= most]
    return fitting, len(requests) - len(fitting)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _table(advice: Advice, workers: int) -> Table:
    table = Table(box=None)
    table.add_column(f"{workers} workers", no_wrap=True)
    of = advice.quantile
    for name in ("requests/s", f"first {of}", f"between {of}", "apart", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    best = {id(advice.split), id(advice.aggregated)}
    for one in advice.carried:
        found = one.found
        goodput = "none" if one.goodput is None else report.number(one.goodput)
        table.add_row(
            one.setup.name,
            goodput,
            f"{report.number(1000 * found.first_token_s[advice.share])} ms",
            f"{report.number(1000 * found.token_s[advice.share])} ms",
            f"{100 * found.apart_share:.0f} %",
            f"{100 * max((*found.prefill_busy, *found.decode_busy)):.0f} %",
            style="bold" if id(one) in best else "",
        )
    return table


def _results(advice: Advice) -> list[Result]:
    found = []
    for one in advice.carried:
        found += _of_one(one, advice)
    split, whole = advice.split.goodput or 0.0, advice.aggregated.goodput or 0.0
    name, unit = "best split: goodput, against the best aggregated", "requests/s"
    found.append(compared(name, split, unit, whole) if whole else Result(name, split, unit))
    found.append(Result("error that was reckoned with", 100 * advice.error, "%"))
    return found


def _of_one(one: Carried, advice: Advice) -> list[Result]:
    name, found = one.setup.name, one.found
    share, of = advice.share, advice.quantile
    return [
        Result(f"{name}: goodput", one.goodput or 0.0, "requests/s"),
        Result(f"{name}: first token, {of}", 1000 * found.first_token_s[share], "ms"),
        Result(f"{name}: between tokens, {of}", 1000 * found.token_s[share], "ms"),
        Result(f"{name}: prefilled apart", 100 * found.apart_share, "%"),
    ]
