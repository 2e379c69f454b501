"""`baton chaos`: finds the experiment, shows its counts and writes them.

An experiment, or a schedule of `run`, is a module with `measure(args)`, which returns its results.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from baton_loadtest import report
from baton_loadtest.chaos.streams.fleet import ROLES, WORKER_ROLES
from batonlm.core.errors import InvalidArgument

TCP = "tcp,self"
"""Over TCP a frozen process answers no reads; over shared memory reads do not involve it."""


def add_kv(kinds: Any) -> None:
    """Adds a parser for every experiment."""
    kinds.add_parser("points", help="list where things can be made to go wrong, and what can")
    corruptions = _two_processes(
        _kind(kinds, "corruptions", "damaged KV chunks against those found", count=10_000)
    )
    corruptions.add_argument(
        "--requests", type=int, default=500, metavar="N", help="whole requests besides; 0: none"
    )
    _two_processes(
        _kind(kinds, "clean", "KV chunks that are taken for damaged and are not", count=100_000)
    )
    _two_processes(
        _kind(
            kinds, "freeze-kill", "either side frozen and killed at every point", count=208, tls=TCP
        )
    )
    late = _two_processes(
        _kind(
            kinds, "late-write", "bytes that arrive when nobody waits any more", count=20, tls=TCP
        )
    )
    late.add_argument("--slot-mib", type=int, default=4, metavar="MIB", help="size of a buffer")
    storm = _kind(kinds, "cancel-storm", "what cancelled requests leave behind", count=10_000)
    storm.add_argument(
        "--samples", type=int, default=300, metavar="N", help="cancels that are timed, one by one"
    )
    head = _kind(kinds, "head-of-line", "requests beside a decode worker in trouble")
    head.add_argument("--rounds", type=int, default=5, metavar="N", help="of each kind")
    head.add_argument("--seconds", type=float, default=4.0, metavar="S", help="of a round")


def _two_processes(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the option of experiments on `sides`, which have no engine."""
    parser.add_argument(
        "--memory",
        choices=("host", "device"),
        default="host",
        help="where buffers lie; device: the code for a GPU's, on ordinary memory; needs nixl",
    )
    return parser


def add_hang(kinds: Any) -> None:
    """Adds the parser of `baton chaos hang`."""
    hang = _kind(kinds, "hang", "a worker of each role that stops and goes on")
    hang.add_argument(
        "--seconds", type=float, nargs="+", default=[1.0, 5.0, 60.0], metavar="S", help="of a stop"
    )
    hang.set_defaults(experiment="hang")


def _kind(
    kinds: Any, name: str, what: str, *, count: int = 0, tls: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=what, description=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="repeats a run")
    parser.add_argument(
        "--transport",
        choices=("nixl", "loopback"),
        default="nixl" if importlib.util.find_spec("nixl") else "loopback",
        help="how KV moves (default %(default)s)",
    )
    if count:
        parser.add_argument("--count", type=int, default=count, metavar="N", help="how many")
        parser.add_argument(
            "--ucx-tls", default=tls, metavar="TLS", help="UCX_TLS (default: %(default)r)"
        )
    return parser


@dataclass(frozen=True, slots=True)
class Length:
    """A schedule's default length."""

    streams: int
    rounds: int = 1
    """Repetitions."""
    hold_s: float = 5.0


LENGTHS = {
    "kills": Length(1000),
    "routers": Length(1000, rounds=5),
    "partitions": Length(200),
    "rolling": Length(200, rounds=2),
    "slow-links": Length(100, hold_s=4.0),
    "tiers": Length(120, rounds=2, hold_s=3.0),
}
"""Each schedule is a module of `streams`."""


def add_streams(parser: argparse.ArgumentParser) -> None:
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
    """Sets defaults that depend on the schedule. Raises InvalidArgument."""
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


def add_parser(subparsers: Any) -> None:
    chaos = subparsers.add_parser("chaos")
    what = chaos.add_subparsers(dest="chaos", metavar="WHAT", required=True)
    kv = what.add_parser("kv", help="the hand-over of KV")
    add_hang(what)
    add_streams(what.add_parser("run", help="whole streams while processes die or leave"))
    add_kv(kv.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True))


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a goal was missed."""
    if args.chaos == "kv" and args.experiment == "points":
        _points()
        return 0
    if args.chaos == "run":
        settle(args)
    if getattr(args, "memory", "host") == "device" and args.transport != "nixl":
        raise InvalidArgument("only nixl moves KV between devices' memories", field="transport")
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
    from batonlm.testing.faults import POINTS, kinds_at

    for point in POINTS:
        print(f"{point:<24} {' '.join(sorted(kind.value for kind in kinds_at(point)))}")
