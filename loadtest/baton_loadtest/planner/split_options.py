"""The options of `baton plan split`; reads nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from baton_loadtest.planner import options


def add_parser(kinds: Any) -> None:
    parser: argparse.ArgumentParser = kinds.add_parser(
        "split",
        help="whether to split workers into prefill and decode, for recorded traffic",
        description="Simulates as many workers aggregated and split in every way, and says which "
        "carries most of the traffic within the targets. See docs/planning.md.",
    )
    add = parser.add_argument
    add("--workers", type=int, required=True, metavar="N", help="of both roles together")
    asked = parser.add_argument_group("traffic")
    which = asked.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines or Azure's CSV"
    )
    which.add_argument(
        "--scenario", type=Path, metavar="FILE.toml", help="of `baton loadtest`, with one turn each"
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
    speed.add_argument("--speed", type=Path, metavar="FILE.json", help="see docs/simulator.md")
    options.add_calibrate(speed)
    add(
        "--local-prefill-tokens", type=int, default=-1, metavar="N",
        help="as the router's option (default -1: by speed)",
    )  # fmt: skip
    add(
        "--error", type=float, default=15.0, metavar="PERCENT",
        help="of goodput that set-ups have to differ by to be told apart (default %(default)g)",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the figures here")
