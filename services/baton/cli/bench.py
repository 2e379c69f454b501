"""`baton bench`: finds the benchmark and writes its figures; measures nothing itself."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from baton.cli import results


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure, and compare within one run")
    kinds = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    relay = kinds.add_parser("relay", help="five processes against the same engine in one process")
    relay.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    relay.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    relay.add_argument("--requests", type=int, default=64, metavar="N")
    relay.add_argument("--concurrency", type=int, default=16, metavar="N")
    relay.add_argument("--prompt-tokens", type=int, default=256, metavar="N")
    relay.add_argument("--output-tokens", type=int, default=64, metavar="N")
    relay.add_argument("--transport", choices=("nixl", "loopback"), default="nixl")
    relay.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs, interleaved")
    relay.add_argument("--seed", type=int, default=0, metavar="N")


def run(args: argparse.Namespace) -> int:
    from baton.cli.bench_relay import measure

    found = measure(args)
    print(results.table(found))
    if args.json:
        results.write(args.json, args.seed, found)
        print(f"written to {args.json}", file=sys.stderr)
    return 0
