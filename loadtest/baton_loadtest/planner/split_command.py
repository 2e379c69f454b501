"""`baton plan split`: reads traffic and speeds, asks what set-ups carry, and answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from baton.core.errors import InvalidArgument
from baton.core.routing.load import UNMEASURED
from baton.core.routing.routing import RoutingPolicy
from baton_loadtest import report, traces
from baton_loadtest.load import scenario
from baton_loadtest.planner import calibrate
from baton_loadtest.planner.asked import Targets
from baton_loadtest.planner.split import Advice, Answer, Carried, Setup, Splitting
from baton_loadtest.report import Result, compared
from baton_loadtest.simulator import calibration, drawn, traffic
from baton_loadtest.simulator.calibration import Calibration
from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.summary import Summary

RUNS = 12
"""That a set-up takes, about."""

LONG_ENOUGH = 30.0
"""Times the target for the first token: a queue that grows shows in traffic that lasts longer."""


def run(args: argparse.Namespace) -> int:
    """Raises InvalidArgument also for a target that no set-up meets."""
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
    for text in said(advice, splitting, targets):
        console.print(text, markup=False)
    if args.json:
        report.write(args.json, args.seed, _results(advice))
        print(f"written to {args.json}", file=sys.stderr)
    return 0


def said(advice: Advice, splitting: Splitting, targets: Targets) -> list[str]:
    """The answer in sentences, and what a reader has to know of it."""
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
    """With curves for prefill workers of their own: those of decode where a file has none."""
    if bool(args.speed) == bool(args.calibrate):
        raise InvalidArgument(
            "say what workers can do: either a file of speeds, or --calibrate with workers that "
            "run, and not both",
            field="speed",
        )
    if args.calibrate:
        told = calibrate.asked(args)
        if not any(one.role == "prefill" for one in told):
            raise InvalidArgument("names no prefill worker: it takes both", field="calibrate")
        return calibrate.calibration_of(told)
    known = calibration.read(args.speed)
    if known.prefill.speed == UNMEASURED:
        known = replace(known, prefill=known.decode)
    return known


def _requests(args: argparse.Namespace) -> list[Request]:
    if args.trace:
        found = traces.read(args.trace, skip_broken=args.skip_broken)
        if found.broken:
            print(f"{len(found.broken)} broken lines were skipped", file=sys.stderr)
        return traffic.requests(found.requests, traffic.Scale(1.0, args.lengths, 1, args.seconds))
    if args.lengths != 1.0:
        raise InvalidArgument("is for traces: a scenario says it itself", field="lengths")
    changes = scenario.Changes(seconds=args.seconds or None, skip_broken=args.skip_broken)
    return drawn.requests(scenario.read(args.scenario, changes).workload(args.seed))


def _fitting(requests: Sequence[Request], known: Calibration) -> tuple[list[Request], int]:
    """Those that every set-up can serve, and how many others there were."""
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
