"""The clients of a measured router, in a process of its own: asks, counts, and takes times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import uvloop

from baton.core.errors import BatonError
from baton.rpc.address import split
from baton.rpc.options import PUBLIC_STREAMS
from baton_loadtest.bench.beside import answer
from baton_loadtest.bench.drains import Drain, Drained, GrpcDrain, Question, SseDrain

SHORT_WORDS = 4
ENDLESS = 1 << 14
FIRST_TEXT_S = 120.0
OPENING = 64
"""Streams that wait for their first text at a time: more would only time out in a queue."""


class Clients:
    """faces: where the router listens, "grpc" and "http", as host:port."""

    def __init__(self) -> None:
        self.faces: dict[str, str] = {}
        self._names = count(1)
        self._drains: list[Drain] = []
        self._streams: list[Drained] = []
        self._silent: list[Drained] = []
        """Of which nothing came yet."""
        self._heard = asyncio.Event()

    async def times(self, face: str, requests: int, words: int) -> dict[str, float]:
        """Seconds to the first text by the request's name, of one request after the other."""
        drain = await self._connect(face)
        times: dict[str, float] = {}
        try:
            for name in [next(self._names) for _ in range(requests)]:
                stream = drain.ask(Question(_prompt(words, name), max_tokens=2))
                await self._until(partial(getattr, stream, "ended"))
                if stream.first_s is None:
                    raise BatonError(f"nothing came over {face}")
                times[str(name)] = stream.first_s
        finally:
            drain.close()
        return times

    async def open(self, face: str, streams: int) -> None:
        """So many endless streams, all of which have begun."""
        share = PUBLIC_STREAMS if face == "grpc" else 1
        for first in range(0, streams, share):
            self._drains.append(await self._connect(face))
            for _ in range(min(share, streams - first)):
                await self._until(lambda: self._waiting() < OPENING)
                question = Question(_prompt(SHORT_WORDS, next(self._names)), ENDLESS)
                self._streams.append(self._drains[-1].ask(question))
                self._silent.append(self._streams[-1])
        await self._until(lambda: not self._waiting())

    def tally(self) -> dict[str, int]:
        """Of all open streams so far."""
        return {
            "events": sum(stream.events for stream in self._streams),
            "tokens": sum(stream.tokens for stream in self._streams),
            "ended": sum(stream.ended for stream in self._streams),
        }

    def close(self) -> None:
        for drain in self._drains:
            drain.close()
        self._drains.clear()
        self._streams.clear()

    def _waiting(self) -> int:
        self._silent = [stream for stream in self._silent if stream.first_s is None]
        return len(self._silent)

    async def _connect(self, face: str) -> Drain:
        loop, kind = asyncio.get_running_loop(), GrpcDrain if face == "grpc" else SseDrain
        host, port = split(self.faces[face], face)
        _, drain = await loop.create_connection(lambda: kind(self._heard.set), host, port)
        return drain

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Raises TimeoutError when that does not come about."""
        async with asyncio.timeout(FIRST_TEXT_S):
            while not reached():
                self._heard.clear()
                await self._heard.wait()


def _prompt(words: int, name: int) -> str:
    return "word " * (words - 1) + str(name)


async def _main() -> None:
    clients = Clients()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "meet":
                clients.faces = command["faces"]
                return {}
            case "times":
                return await clients.times(command["face"], command["requests"], command["words"])
            case "open":
                await clients.open(command["face"], command["streams"])
                return {}
            case "tally":
                return clients.tally()
            case _:
                clients.close()
                return {}

    await answer(handle)


if __name__ == "__main__":
    uvloop.run(_main())
