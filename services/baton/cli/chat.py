"""`baton chat`: asks a running Baton over gRPC, once or turn by turn; knows only terminals."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console

from baton.cli import state
from baton.cli.chat_client import ChatClient, Conversation, Turn
from baton.core.errors import BatonError, ContextLengthExceeded, InvalidArgument
from baton.v1 import inference_pb2, types_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
_HINT = "Ctrl-D ends, Ctrl-C stops an answer."

# What a model says may hold escape sequences; a terminal must not obey them.
_TERMINAL_SAFE = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("chat", help="ask a running Baton something")
    parser.add_argument("prompt", nargs="?", help="without one: a conversation, or standard input")
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help=f"default: where `baton up` runs, else {DEFAULT_ADDRESS}",
    )
    parser.add_argument("--model", default="", help="default: the only one served")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")


def run(args: argparse.Namespace) -> int:
    conversation = Conversation(_options(args), args.model, args.system)
    prompt: str | None = args.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    with ChatClient(args.grpc or running_address()) as client:
        if prompt is None:
            return _converse(client, conversation)
        turn = _answer(client, conversation, prompt)
        return 0 if turn.finished else 130


def ask(address: str, prompt: str) -> None:
    """Asks once and prints the answer as it comes. Raises BatonError."""
    with ChatClient(address) as client:
        _answer(client, Conversation(inference_pb2.GenerationOptions()), prompt)


def running_address() -> str:
    """Where the Baton that `baton up` started answers gRPC, else the default address."""
    running = state.read()
    return str(running["grpc"]) if running else DEFAULT_ADDRESS


def _options(args: argparse.Namespace) -> inference_pb2.GenerationOptions:
    return inference_pb2.GenerationOptions(
        sampling=types_pb2.SamplingParams(
            temperature=args.temperature, seed=_in_range("seed", args.seed, 2**64 - 1)
        ),
        stop=types_pb2.StopParams(max_tokens=_in_range("max_tokens", args.max_tokens, 2**31 - 1)),
    )


def _in_range(field: str, value: int | None, most: int) -> int | None:
    """Protobuf would only say that a value does not fit."""
    if value is not None and not 0 <= value <= most:
        raise InvalidArgument(f"{field} must be from 0 to {most}", field=field)
    return value


def _converse(client: ChatClient, conversation: Conversation) -> int:
    with suppress(ImportError):
        importlib.import_module("readline")  # gives input() a history and line editing
    print(_HINT, file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if prompt.strip():
            _turn(client, conversation, prompt)


def _turn(client: ChatClient, conversation: Conversation, prompt: str) -> None:
    """One turn of a conversation. When all no longer fits the model, the oldest turns go."""
    while True:
        try:
            turn = _answer(client, conversation, prompt)
        except ContextLengthExceeded as error:
            if conversation.turns:
                del conversation.turns[0]
                continue
            print(f"baton chat: {error.message}", file=sys.stderr)
        except BatonError as error:
            print(f"baton chat: {error.message}", file=sys.stderr)
        else:
            if turn.text:
                conversation.turns.append((prompt, turn.text))
        return


def _answer(client: ChatClient, conversation: Conversation, prompt: str) -> Turn:
    """Prints text to standard output, and how fast it came to a terminal's standard error."""
    turn = client.ask(conversation, prompt, _show)
    print(flush=True)
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(_summary(turn), style="dim")
    return turn


def _show(text: str) -> None:
    if sys.stdout.isatty():
        text = text.translate(_TERMINAL_SAFE)
    print(text, end="", flush=True)


def _summary(turn: Turn) -> str:
    if not turn.finished:
        return "stopped"
    return (
        f"{turn.tokens} tokens, first after {turn.first_s * 1000:.0f} ms, "
        f"then {turn.tokens_per_s:.1f} tokens/s"
    )
