"""`baton chaos`: finds the experiment, shows its counts and writes them; breaks nothing itself.

An experiment, or a schedule of `run`, is a module with `measure(args)`, which returns its results.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from baton_loadtest import report
from baton_loadtest.chaos import options
from baton_loadtest.chaos.streams import options as streams_options


def add_parser(subparsers: Any) -> None:
    chaos = subparsers.add_parser("chaos")
    what = chaos.add_subparsers(dest="chaos", metavar="WHAT", required=True)
    kv = what.add_parser("kv", help="the hand-over of KV")
    options.add_hang(what)
    streams_options.add(what.add_parser("run", help="whole streams while processes die or leave"))
    options.add(kv.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True))


def run(args: argparse.Namespace) -> int:
    """1 when a goal was missed."""
    if args.chaos == "kv" and args.experiment == "points":
        _points()
        return 0
    if args.chaos == "run":
        streams_options.settle(args)
    print(f"seed {args.seed}", file=sys.stderr)
    name = f"streams.{args.schedule}" if args.chaos == "run" else args.experiment
    module = import_module(f"baton_loadtest.chaos.{name.replace('-', '_')}")
    found: list[report.Result] = module.measure(args)
    print(report.table(found))
    if args.json:
        report.write(args.json, args.seed, found)
        print(f"written to {args.json}", file=sys.stderr)
    return int(any(result.met is False for result in found))


def _points() -> None:
    from baton.testing.faults import POINTS, kinds_at

    for point in POINTS:
        print(f"{point:<24} {' '.join(sorted(kind.value for kind in kinds_at(point)))}")
