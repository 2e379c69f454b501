"""A conversation on a terminal: prompts in, text out as it comes."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

from rich.console import Console

from baton.cli.chat_client import ChatClient, Conversation, Turn
from baton.core.errors import BatonError, ContextLengthExceeded

_HINT = "Ctrl-D ends, Ctrl-C stops an answer."

# What a model says may hold escape sequences; a terminal must not obey them.
_TERMINAL_SAFE = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def converse(client: ChatClient, conversation: Conversation) -> None:
    """Asks and answers until Ctrl-D."""
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
    """One turn of a conversation. When all no longer fits the model, the oldest turns go."""
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


def answer(client: ChatClient, conversation: Conversation, prompt: str) -> Turn:
    """Prints text to standard output, and how fast it came to a terminal's standard error."""
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = True
        print(_safe(text), end="", flush=True)

    try:
        turn = client.ask(conversation, prompt, show)
    except BatonError:
        if shown:  # the error gets a line of its own
            print(flush=True)
        raise
    print(flush=True)
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(_summary(turn), style="dim")
    return turn


def _safe(text: str) -> str:
    return text.translate(_TERMINAL_SAFE) if sys.stdout.isatty() else text


def _summary(turn: Turn) -> str:
    if not turn.finished:
        return "stopped"
    return (
        f"{turn.tokens} tokens, first after {turn.first_s * 1000:.0f} ms, "
        f"then {turn.tokens_per_s:.1f} tokens/s"
    )
