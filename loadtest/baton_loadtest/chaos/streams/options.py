"""The flags of `baton chaos run`, and how long each schedule is; imports no schedule."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import InvalidArgument
from baton_loadtest.chaos.streams.roles import WORKER_ROLES


@dataclass(frozen=True, slots=True)
class Length:
    """What a schedule takes when nothing else is said. rounds: of what it repeats."""

    streams: int
    rounds: int = 1
    hold_s: float = 5.0


LENGTHS = {
    "kills": Length(1000),
    "routers": Length(80, rounds=5),
    "partitions": Length(200),
    "rolling": Length(200, rounds=2),
    "slow-links": Length(100, hold_s=4.0),
}
"""Each schedule is a module of this package."""


ROLES = (*WORKER_ROLES, "router")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedule", choices=LENGTHS, default="kills", help="what happens (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="repeats a run")
    parser.add_argument(
        "--streams", type=_positive, default=None, metavar="N", help="how many different ones"
    )
    parser.add_argument(
        "--concurrency", type=_positive, default=16, metavar="N",
        help="streams at a time (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--routers", type=_positive, default=1, metavar="N",
        help="router replicas of the schedule kills (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--down", type=_positive, default=4, metavar="N",
        help="workers that are down at a time, of different roles (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--roles", nargs="+", choices=ROLES, default=ROLES, metavar="ROLE",
        help="whose processes die, or are restarted (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_positive, default=None, metavar="N", help="of what is repeated"
    )
    parser.add_argument(
        "--cuts", type=_natural, default=0, metavar="N",
        help="links that are cut or made slow; 0: all there are (default)",
    )  # fmt: skip
    parser.add_argument(
        "--hold", type=float, default=None, metavar="S", help="how long each of these lasts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="keep the processes' logs in this folder"
    )
    parser.add_argument(
        "--transport",
        choices=("nixl", "loopback"),
        default="nixl" if importlib.util.find_spec("nixl") else "loopback",
        help="how KV moves (default %(default)s)",
    )


def settle(args: argparse.Namespace) -> None:
    """Fills in what depends on the schedule. Raises InvalidArgument."""
    length = LENGTHS[args.schedule]
    args.streams = args.streams or length.streams
    args.rounds = args.rounds or length.rounds
    args.hold = length.hold_s if args.hold is None else args.hold
    if args.schedule == "kills" and not set(args.roles) & set(WORKER_ROLES):
        raise InvalidArgument("must name a worker's role", field="roles")
    if args.hold < 0:
        raise InvalidArgument("must not be negative", field="hold")


def _positive(word: str) -> int:
    return _at_least(1, word)


def _natural(word: str) -> int:
    return _at_least(0, word)


def _at_least(least: int, word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}")
    return number
