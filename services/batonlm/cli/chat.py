"""`baton chat`: chats with a running Baton over gRPC, for one prompt or turn by turn."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from batonlm.cli import access
from batonlm.cli.access import Access
from batonlm.client import AsyncClient, Delta, Finished, Message, Options
from batonlm.core.errors import BatonError, ContextLengthExceeded, InvalidArgument, Unavailable
from batonlm.rpc.address import split

CONNECT_S = 5.0


@dataclass(slots=True)
class ChatTurn:
    """One answer."""

    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    """Seconds from the request to the first text."""
    total_s: float = 0.0
    """Seconds from the request to the end."""
    finished: bool = False
    """False if the answer was stopped."""

    @property
    def tokens_per_s(self) -> float:
        """The speed after the first token."""
        after = self.total_s - self.first_s
        return (self.tokens - 1) / after if after > 0 and self.tokens > 1 else 0.0


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the options of the next answer."""

    options: Options = field(default_factory=Options)
    model: str = ""
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, prompt: str) -> list[Message]:
        """Returns all messages, with the next prompt."""
        messages = [Message("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            messages += [Message("user", asked), Message("assistant", answered)]
        return [*messages, Message("user", prompt)]


class ChatClient:
    """A client of one router. A context manager.

    Ctrl-C cancels a task: KeyboardInterrupt, which a signal raises anywhere in the thread, can get
    lost within gRPC, and the answer would continue.
    """

    def __init__(self, access: Access) -> None:
        """Raises InvalidArgument for an invalid address, Unavailable if nothing listens there."""
        host, port = split(access.address, "grpc")
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            raise Unavailable(
                f"nothing listens on {access.address}: start it with 'baton up'"
            ) from None
        tls = False if access.ca is None else access.ca or True
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(_connected(access.address, access.key, tls))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._client.aclose())
        finally:
            self._runner.close()

    def ask(self, conversation: Conversation, prompt: str, show: Callable[[str], None]) -> ChatTurn:
        """Returns the whole answer, and passes each piece of text to `show` as it arrives.

        Ctrl-C stops the answer and returns the part received so far. Any other failure raises
        BatonError. The conversation is not changed.
        """
        turn = ChatTurn()
        began = time.monotonic()
        with suppress(KeyboardInterrupt):
            self._runner.run(self._follow(turn, began, conversation, prompt, show))
        turn.total_s = time.monotonic() - began
        return turn

    async def _follow(
        self,
        turn: ChatTurn,
        began: float,
        conversation: Conversation,
        prompt: str,
        show: Callable[[str], None],
    ) -> None:
        messages, options = conversation.messages(prompt), conversation.options
        async with self._client.chat(messages, model=conversation.model, **options) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    turn.first_s = turn.first_s or time.monotonic() - began
                    turn.text += event.text
                    show(event.text)
                elif isinstance(event, Finished):
                    turn.tokens = event.completion_tokens
                    turn.finished = True


async def _connected(address: str, key: str, tls: bool | bytes) -> AsyncClient:
    """Connects on the event loop that uses the client."""
    return AsyncClient(address, api_key=key, tls=tls)


_HINT = "Ctrl-D ends, Ctrl-C stops an answer."

# A model's text may contain escape sequences, which must not reach the terminal.
_TERMINAL_SAFE = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def converse(client: ChatClient, conversation: Conversation) -> None:
    """Reads prompts and prints answers until Ctrl-D."""
    with suppress(ImportError):
        importlib.import_module("readline")  # gives input() a history and line editing
    print(_HINT, file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if prompt.strip():
            _turn(client, conversation, prompt)


def _turn(client: ChatClient, conversation: Conversation, prompt: str) -> None:
    """Runs one turn. If the conversation no longer fits the model, the oldest turns are dropped."""
    while True:
        try:
            turn = answer(client, conversation, prompt)
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


def answer(client: ChatClient, conversation: Conversation, prompt: str) -> ChatTurn:
    """Prints the text to standard output, and the speed to standard error if that is a terminal."""
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = True
        print(_safe(text), end="", flush=True)

    try:
        turn = client.ask(conversation, prompt, show)
    except BatonError:
        if shown:  # the error gets its own line
            print(flush=True)
        raise
    print(flush=True)
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(_summary(turn), style="dim")
    return turn


def _safe(text: str) -> str:
    return text.translate(_TERMINAL_SAFE) if sys.stdout.isatty() else text


def _summary(turn: ChatTurn) -> str:
    if not turn.finished:
        return "stopped"
    return (
        f"{turn.tokens} tokens, first after {turn.first_s * 1000:.0f} ms, "
        f"then {turn.tokens_per_s:.1f} tokens/s"
    )


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
    parser.add_argument("--model", default="", help="default: the first one served")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")


def run(args: argparse.Namespace) -> int:
    """Returns 130 if the answer was stopped, else 0. Raises BatonError."""
    from batonlm.client import Options

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
    """Sends one prompt and prints the answer as it arrives. Raises BatonError."""

    with ChatClient(where) as client:
        answer(client, Conversation(), prompt)


def _in_range(field: str, value: int, most: int) -> int:
    """Validates a value before a connection is made."""
    if not 0 <= value <= most:
        raise InvalidArgument(f"{field} must be from 0 to {most}", field=field)
    return value
