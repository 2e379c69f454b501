"""`baton explain`: one request as a picture; knows flags and addresses."""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

from baton.cli import access
from baton.core.errors import InvalidArgument, Unavailable

DEFAULT_ADDRESS = "127.0.0.1:8000"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        description="Asks routers what they remember of a request: its stages, its attempts, who "
        "was looked at and why it ran where it did.",
    )
    parser.add_argument(
        "id", metavar="ID", help="of an answer, or its header x-baton-request-id or x-request-id"
    )
    add_router_arguments(parser)
    parser.add_argument("--json", action="store_true", help="what the router says, as it is")
    parser.add_argument(
        "--replay", metavar="FILE", type=Path,
        help="write what 'baton replay' needs to make its tokens again, where routers keep that",
    )  # fmt: skip
    parser.add_argument(
        "--text", action="store_true",
        help="with --replay: also the grammar that the request named",
    )  # fmt: skip


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
    from baton.router.api.http.answer_schema import Explained

    if args.replay is not None:
        query = "?replay=text" if args.text else "?replay=ids"
        _write(args.replay, ask(routers_of(args), path_of(args.id, query)))
        return 0
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


def _write(path: Path, document: bytes) -> None:
    """For its owner alone: it holds a prompt. Raises InvalidArgument."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(document + b"\n")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="replay") from None
