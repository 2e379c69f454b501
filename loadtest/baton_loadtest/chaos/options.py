"""The flags of every experiment on hand-overs, and how long each takes; imports no experiment."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

TCP = "tcp,self"
"""Over TCP a frozen process answers no read; over shared memory it need not even know of one."""


def add(kinds: Any) -> None:
    """Adds a parser for every experiment."""
    kinds.add_parser("points", help="list where things can be made to go wrong, and what can")
    corruptions = _kind(kinds, "corruptions", "damaged KV chunks against those found", count=10_000)
    corruptions.add_argument(
        "--requests", type=int, default=500, metavar="N", help="whole requests besides; 0: none"
    )
    _kind(kinds, "clean", "KV chunks that are taken for damaged and are not", count=100_000)
    _kind(kinds, "freeze-kill", "either side frozen and killed at every point", count=208, tls=TCP)
    late = _kind(
        kinds, "late-write", "bytes that arrive when nobody waits any more", count=20, tls=TCP
    )
    late.add_argument("--slot-mib", type=int, default=4, metavar="MIB", help="size of a buffer")
    storm = _kind(kinds, "cancel-storm", "what cancelled requests leave behind", count=10_000)
    storm.add_argument(
        "--samples", type=int, default=300, metavar="N", help="cancels that are timed, one by one"
    )
    head = _kind(kinds, "head-of-line", "requests beside a decode worker in trouble")
    head.add_argument("--rounds", type=int, default=5, metavar="N", help="of each kind")
    head.add_argument("--seconds", type=float, default=4.0, metavar="S", help="of a round")


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
