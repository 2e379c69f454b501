"""`baton replay`: makes a request's tokens again, and says whether they are; knows flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from baton.cli import access
from baton.core.errors import InvalidArgument

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        description="Sends the token ids of FILE (of 'baton explain ID --replay FILE') with the "
        "same sampling and seed, and compares what comes: 0 when all tokens are the same, else 1.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help=f"default: where `baton up` runs, else {DEFAULT_ADDRESS}",
    )
    access.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the tokens are the same, 1 when they are not. Raises BatonError."""
    from baton.cli.explaining.replaying import replay
    from baton.client import Client

    file = _read(args.file)
    where = access.access_of(args, DEFAULT_ADDRESS)
    tls = False if where.ca is None else where.ca or True
    with Client(where.address, api_key=where.key, tls=tls) as client:
        outcomes = replay(client, file)
    for outcome in outcomes:
        said = "the same" if outcome.same else f"OTHER tokens (there are {outcome.made} now)"
        print(f"choice {outcome.choice}: {outcome.expected} tokens, {said}")
    if all(outcome.same for outcome in outcomes):
        return 0
    print(_why(exact=file.exact))
    return 1


def _why(*, exact: bool) -> str:
    if not exact:
        return "The request was not served in exact mode: the same tokens are not promised."
    return (
        "The request was served in exact mode. The same tokens are promised of workers in exact "
        "mode with the same weights, numbers (dtype, quantization) and kind of device."
    )


def _read(path: Path) -> Any:
    """A ReplayFile. Raises InvalidArgument."""
    import msgspec

    from baton.router.api.http.answer_schema import ReplayFile

    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayFile)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="FILE") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # msgspec's texts name what is wrong and where, and nothing else.
        raise InvalidArgument(f"{path} is no replay file: {error}", field="FILE") from None
