"""`baton explain`: one request as a picture; knows flags and addresses."""

from __future__ import annotations

import argparse
import copy
from typing import Any

from baton.cli import access
from baton.core.errors import Unavailable

DEFAULT_ADDRESS = "127.0.0.1:8000"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="where one request's time went, on which workers, and why there",
        description="Asks routers what they remember of a request: its stages, its attempts, who "
        "was looked at and why it ran where it did.",
    )
    parser.add_argument(
        "id", metavar="ID", help="of an answer, or its header x-baton-request-id or x-request-id"
    )
    add_router_arguments(parser)
    parser.add_argument("--json", action="store_true", help="what the router says, as it is")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        metavar="HOST:PORT,…",
        help="routers that may know; every address of a name is asked "
        f"(default: where `baton up` runs, else {DEFAULT_ADDRESS})",
    )
    access.add_arguments(parser)


def routers_of(args: argparse.Namespace) -> list[access.Access]:
    """Every router that was named. Raises InvalidArgument."""
    from baton.cli.explaining.asking import everyone

    found = []
    for address in (args.http or "").split(","):
        one = copy.copy(args)
        one.http = address.strip().rpartition("/")[2] or None
        found += everyone(access.access_of(one, DEFAULT_ADDRESS, "http"))
    return found


def run(args: argparse.Namespace) -> int:
    """0 when a router knows it. Raises BatonError."""
    import msgspec

    from baton.cli.explaining.asking import ask, path_of
    from baton.cli.explaining.picture import show
    from baton.router.http.explain_schema import Explained

    said = ask(routers_of(args), path_of(args.id))
    if args.json:
        print(said.decode())
        return 0
    try:
        explained = msgspec.json.decode(said, type=Explained)
    except msgspec.MsgspecError:
        raise Unavailable(
            "the router is of another version than this command; see its answer with --json"
        ) from None
    show(explained)
    return 0
