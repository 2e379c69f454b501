"""`baton top`: finds the processes, looks at them again and again, and shows what they do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.live import Live

from baton.cli import access, state
from baton.cli.http_client import trust
from baton.cli.top.draw import document, drawn
from baton.cli.top.watch import Source, Watch
from baton.core.errors import InvalidArgument
from baton.rpc.address import split

SHORTEST_S, LONGEST_S = 0.1, 60.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("top")
    parser.add_argument(
        "--http", metavar="HOST:PORT",
        help="a router's HTTP address (default: where `baton up` runs, with all its processes)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="HOST:PORT,…", default="",
        help="where workers, or routers, have --metrics-listen",
    )  # fmt: skip
    access.add_arguments(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S",
        help="seconds between two looks (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true",
        help="show what one interval has to tell and end; so without a terminal",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as --once, and print JSON")


def run(args: argparse.Namespace) -> int:
    """1 when no process answers, else 0."""
    if not SHORTEST_S <= args.interval <= LONGEST_S:
        raise InvalidArgument(f"must be {SHORTEST_S:g} to {LONGEST_S:g}", field="interval")
    with closing(Watch(_sources(args))) as watch:
        if args.once or args.json or not sys.stdout.isatty():
            return _once(watch, args)
        try:
            _live(watch, args.interval)
        except KeyboardInterrupt:
            return 0
    return 0


def _once(watch: Watch, args: argparse.Namespace) -> int:
    watch.look()
    time.sleep(args.interval)
    found = watch.look()
    if args.json:
        print(json.dumps(document(found), indent=2))
    else:
        Console(highlight=False).print(drawn(found))
    return int(not any(pool.asked for pool in found.pools))


def _live(watch: Watch, interval_s: float) -> None:
    """Until Ctrl-C. The terminal's size is asked for whenever it is drawn."""
    console = Console(highlight=False)
    with Live(drawn(watch.look()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(drawn(watch.look()), refresh=True)


def _sources(args: argparse.Namespace) -> Callable[[], Sequence[Source]]:
    """Raises InvalidArgument when there is nothing to look at."""
    named = [part.strip() for part in args.workers.split(",") if part.strip()]
    for address in named:
        split(address, "workers")
    there = access.access_of(args, "", face="http")
    trusted = trust(there.ca)
    if args.http or named:
        fixed = [Source(f"http://{address}/metrics") for address in named]
        if args.http:
            scheme = "http" if there.ca is None else "https"
            fixed.insert(0, Source(f"{scheme}://{args.http}/metrics", trusted, there.key))
        return lambda: fixed
    if state.read() is None:
        raise InvalidArgument("no Baton runs here: --http names a router, --workers the others")

    def running() -> list[Source]:
        """Ports stay when a process is started again; the file goes when all have ended."""
        said = state.read() or {}
        return [
            Source(each["metrics"], trusted, said.get("token", ""))
            if each["role"] == "router"
            else Source(each["metrics"])
            for each in said.get("processes", ())
        ]

    return running
