"""`baton chat`: asks a running Baton over gRPC, once or turn by turn; knows flags and addresses."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from baton.cli import access
from baton.core.errors import InvalidArgument

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("chat")
    parser.add_argument("prompt", nargs="?", help="without one: a conversation, or standard input")
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help=f"default: where `baton up` runs, else {DEFAULT_ADDRESS}",
    )
    access.add_arguments(parser)
    parser.add_argument("--model", default="", help="default: the only one served")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")


def run(args: argparse.Namespace) -> int:
    """130 when the answer was stopped, else 0. Raises BatonError."""
    from baton.cli.chat_client import ChatClient, Conversation
    from baton.cli.chat_terminal import answer, converse
    from baton.client import Options

    options = Options()
    if args.temperature is not None:
        options["temperature"] = args.temperature
    if args.seed is not None:
        options["seed"] = _in_range("seed", args.seed, 2**64 - 1)
    if args.max_tokens is not None:
        options["max_tokens"] = _in_range("max_tokens", args.max_tokens, 2**31 - 1)
    conversation = Conversation(options, args.model, args.system)
    prompt: str | None = args.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    with ChatClient(access.access_of(args, DEFAULT_ADDRESS)) as client:
        if prompt is None:
            converse(client, conversation)
            return 0
        return 0 if answer(client, conversation, prompt).finished else 130


def ask(where: access.Access, prompt: str) -> None:
    """Asks once and prints the answer as it comes. Raises BatonError."""
    from baton.cli.chat_client import ChatClient, Conversation
    from baton.cli.chat_terminal import answer

    with ChatClient(where) as client:
        answer(client, Conversation(), prompt)


def _in_range(field: str, value: int, most: int) -> int:
    """Before anything is connected."""
    if not 0 <= value <= most:
        raise InvalidArgument(f"{field} must be from 0 to {most}", field=field)
    return value
