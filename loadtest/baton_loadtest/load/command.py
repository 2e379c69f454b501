"""`baton loadtest`: runs a scenario against a server and shows the results."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_loadtest import scenario_file, scenarios
from batonlm.cli import access
from batonlm.core.errors import InvalidArgument

if TYPE_CHECKING:
    from baton_loadtest.load.runs import Runs
    from baton_loadtest.load.scenario import Source

DEFAULT_ADDRESSES = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:50051"}
STOPPED = 130


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "loadtest",
        description="Sends the requests of a scenario or a trace when they are due, whatever "
        "became of those before, and prints percentiles and goodput. See docs/loadtest.md.",
    )
    parser.add_argument(
        "scenario", metavar="SCENARIO", type=scenario_file, nargs="?",
        help=f"a TOML file, or a bundled one: {', '.join(scenarios())}",
    )  # fmt: skip
    faces = parser.add_mutually_exclusive_group()
    for face, default in DEFAULT_ADDRESSES.items():
        faces.add_argument(
            f"--{face}", nargs="?", const="", metavar="HOST:PORT",
            help=f"ask over {face} (default: where `baton up` runs, else {default})",
        )  # fmt: skip
    access.add_arguments(parser)
    parser.add_argument("--model", default="", metavar="NAME", help="default: the only one served")
    _asked(parser)
    _judged(parser)
    _searched(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots here")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if requests were answered, 1 if none was or no rate met the objectives, 130 if it
    was stopped. Raises BatonError."""
    from baton_loadtest.load import scenario
    from baton_loadtest.load.runs import Runs
    from baton_loadtest.report import check_plots

    changes = scenario.Changes(
        trace=args.trace,
        rate=args.rate,
        seconds=args.seconds,
        speed=args.speed,
        scale=args.scale,
        most_tokens=args.most_tokens,
        skip_broken=args.skip_broken,
    )
    if args.html:
        check_plots("html")
    if args.scenario is None and args.trace is None:
        raise InvalidArgument("name a scenario file or --trace", field="scenario")
    for name in ("max_open", "timeout_s", "slo_first_s", "slo_between_s", "lag_s"):
        if not 0 < getattr(args, name) < math.inf:
            raise InvalidArgument("must be above 0", field=name)
    source = scenario.read(args.scenario, changes)
    for text in scenario.skipped(source):
        print(f"skipped: {text}", file=sys.stderr)
    face = "grpc" if args.grpc is not None else "http"
    where = access.access_of(args, DEFAULT_ADDRESSES[face], face)
    runs = Runs(args, face, where)
    return _search(args, runs, source) if args.search else _once(args, runs, source)


def _once(args: argparse.Namespace, runs: Runs, source: Source) -> int:
    from baton_loadtest import report
    from baton_loadtest.load import page

    name = _name(args)
    summary = runs.run(source, name)
    found = summary.results()
    print(report.table(found))
    for text in summary.warnings():
        print(text, file=sys.stderr)
    if args.json:
        _write(args, found)
    if args.html:
        page.write(args.html, page.of_run(summary, name))
        print(f"written to {args.html}", file=sys.stderr)
    if summary.run.stopped:
        return STOPPED
    if summary.answered:
        return 0
    ends = ", ".join(f"{count} {end}" for end, count in summary.ends.most_common())
    print(f"No request was answered: {ends or 'none was due'}.", file=sys.stderr)
    return 1


def _search(args: argparse.Namespace, runs: Runs, source: Source) -> int:
    from baton_loadtest import report
    from baton_loadtest.load import page
    from baton_loadtest.load.search import Range, Verdict
    from baton_loadtest.report import Result

    if not 0 < args.search_share <= 1:
        raise InvalidArgument("must be above 0, and at most 1", field="search_share")
    lowest = args.search_from or source.mean_rate
    bounds = Range(lowest, args.search_to or 1000 * lowest, args.search_step)
    found, tried = runs.search(source, bounds, args.search_share)
    figures = [
        Result(f"within objectives at {rate:.4g}/s", 100 * summary.share_met, "%")
        for rate, summary in tried
    ]
    figures += [
        Result("to be within objectives", 100 * args.search_share, "%"),
        Result("highest rate within objectives", found.rate or 0.0, "1/s"),
    ]
    print(report.table(figures))
    print(found.conclusion())
    if args.json:
        _write(args, figures)
    if args.html:
        page.write(args.html, page.of_search(tried, figures, found.conclusion(), _name(args)))
        print(f"written to {args.html}", file=sys.stderr)
    if found.tried[-1][1] is Verdict.STOPPED:
        return STOPPED
    return 0 if found.rate is not None else 1


def _name(args: argparse.Namespace) -> str:
    return str((args.trace or args.scenario).name)


def _write(args: argparse.Namespace, found: list[Any]) -> None:
    from baton_loadtest import report

    try:
        report.write(args.json, args.seed, found)
    except OSError as error:
        raise InvalidArgument(f"{args.json}: {error.strerror}", field="json") from None
    print(f"written to {args.json}", file=sys.stderr)


def _asked(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="Mooncake's JSON lines or Azure's CSV, instead of the scenario's arrivals",
    )  # fmt: skip
    asked.add_argument("--skip-broken", action="store_true", help="broken lines of the trace")
    asked.add_argument(
        "--rate", type=float, metavar="R",
        help="sessions a second on average: the scenario's arrivals, or the trace, so much denser",
    )  # fmt: skip
    asked.add_argument("--speed", type=float, metavar="X", help="of the trace: times as fast")
    asked.add_argument("--seconds", type=float, metavar="S", help="that requests arrive for")
    asked.add_argument("--scale", type=float, metavar="X", help="of all drawn lengths")
    asked.add_argument(
        "--most-tokens", type=int, metavar="N",
        help="of a request with its answer: the model's context; longer ones are cut",
    )  # fmt: skip
    asked.add_argument(
        "--token-ids", default="64-1899", metavar="A-B",
        help="prompts are drawn of these (default %(default)s: most vocabularies have them)",
    )  # fmt: skip
    asked.add_argument("--seed", type=int, default=0, metavar="N")
    asked.add_argument(
        "--max-open", type=int, default=4096, metavar="N",
        help="requests at a time; those beyond are not sent (default %(default)s)",
    )  # fmt: skip
    asked.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S",
        help="of a request, and from the last arrival to the end (default %(default)g)",
    )  # fmt: skip


def _judged(parser: argparse.ArgumentParser) -> None:
    judged = parser.add_argument_group("objectives")
    judged.add_argument(
        "--slo-first-s", type=float, default=2.0, metavar="S",
        help="to the first token, from when the request was due (default %(default)g)",
    )  # fmt: skip
    judged.add_argument(
        "--slo-between-s", type=float, default=0.25, metavar="S",
        help="between tokens, on average of a request (default %(default)g)",
    )  # fmt: skip
    judged.add_argument(
        "--lag-s", type=float, default=0.01, metavar="S",
        help="99 %% leave within it, or the schedule was not kept (default %(default)g)",
    )  # fmt: skip


def _searched(parser: argparse.ArgumentParser) -> None:
    searched = parser.add_argument_group("search")
    searched.add_argument(
        "--search", action="store_true",
        help="find the highest rate within objectives, with a run of --seconds for each",
    )  # fmt: skip
    searched.add_argument(
        "--search-share", type=float, default=0.99, metavar="X",
        help="of requests that have to be within them (default %(default)g)",
    )  # fmt: skip
    searched.add_argument(
        "--search-from", type=float, metavar="R", help="lowest rate (default: the scenario's)"
    )
    searched.add_argument(
        "--search-to", type=float, metavar="R", help="highest rate (default: 1000 times as much)"
    )
    searched.add_argument(
        "--search-step", type=float, default=0.05, metavar="X",
        help="how near to the first rate that is too much, as a share (default %(default)g)",
    )  # fmt: skip
