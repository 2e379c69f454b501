"""One conversation with a router, turn by turn.

Ctrl-C cancels a task. Raised by a signal wherever it finds the thread, KeyboardInterrupt can get
lost within gRPC, and the answer would go on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from baton.cli.access import Access
from baton.client import AsyncClient, Delta, Finished, Message, Options
from baton.core.errors import Unavailable
from baton.rpc.address import split

CONNECT_S = 5.0


@dataclass(slots=True)
class Turn:
    """One answer. first_s and total_s: seconds from sending to the first text and to the end.

    finished is false for an answer that was stopped.
    """

    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    finished: bool = False

    @property
    def tokens_per_s(self) -> float:
        """After the first token: what the reader feels."""
        after = self.total_s - self.first_s
        return (self.tokens - 1) / after if after > 0 and self.tokens > 1 else 0.0


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how the next answer is made."""

    options: Options = field(default_factory=Options)
    model: str = ""
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, prompt: str) -> list[Message]:
        """All of them, with the next one."""
        messages = [Message("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            messages += [Message("user", asked), Message("assistant", answered)]
        return [*messages, Message("user", prompt)]


class ChatClient:
    """Speaks to one router; a context manager."""

    def __init__(self, access: Access) -> None:
        """Raises InvalidArgument for what is no address, Unavailable when nothing listens."""
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

    def ask(self, conversation: Conversation, prompt: str, show: Callable[[str], None]) -> Turn:
        """The whole answer; `show` gets each piece of text as it comes.

        Ctrl-C stops the answer and returns what there is. Any other end raises BatonError. The
        conversation is not changed.
        """
        turn = Turn()
        began = time.monotonic()
        with suppress(KeyboardInterrupt):
            self._runner.run(self._follow(turn, began, conversation, prompt, show))
        turn.total_s = time.monotonic() - began
        return turn

    async def _follow(
        self,
        turn: Turn,
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
    """Made on the loop that it is used on."""
    return AsyncClient(address, api_key=key, tls=tls)
