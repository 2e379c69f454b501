"""`baton bench`: finds the benchmark, shows its figures, writes and plots them; measures nothing.

A benchmark is a module of this package with `measure(args)`, which returns a Report.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from baton_loadtest import report
from baton_loadtest.bench import options
from baton_loadtest.report import Report


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench")
    options.add(parser.add_subparsers(dest="bench", metavar="BENCH", required=True))


def run(args: argparse.Namespace) -> int:
    """A missed goal is printed, and is no failure."""
    if args.plot:
        report.check_plots()
    found: Report = import_module(f"baton_loadtest.bench.{args.bench}").measure(args)
    print(report.table(found.results))
    if args.json:
        report.write(args.json, args.seed, found.results)
        print(f"written to {args.json}", file=sys.stderr)
    if args.plot:
        report.draw(args.plot, found.charts)
        print(f"drawn in {args.plot}", file=sys.stderr)
    return 0
