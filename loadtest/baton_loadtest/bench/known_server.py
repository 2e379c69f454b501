"""A server of streamed completions with random latencies, which it records.

The reports of a load generator can be compared with the records. The server runs in its own process
(`known`); times are in seconds. It uses asyncio's protocols and httptools' parser, because a
framework's own time per token would be a part of the records.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import httptools

from baton_loadtest.child import answer
from baton_loadtest.launch import Peer, peer

MOST_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class Latencies:
    """The server's behaviour. Each `*_every` is a number of requests, counted from the first, after
    which something else happens; 0: never."""

    first_s: float = 0.08
    """Median time to the first token."""
    between_s: float = 0.02
    """Median time between tokens."""
    spread: float = 0.4
    """Standard deviation of the logarithm of both."""
    seed: int = 0
    refuse_every: int = 0
    """Responds with 429."""
    fail_every: int = 0
    """Responds with 500."""
    cut_every: int = 0
    """Breaks the connection after the first token."""
    close_every: int = 0
    """Closes the connection after the answer."""


@dataclass(slots=True)
class KnownAnswer:
    """The server's record of one complete answer."""

    first_s: float
    """From the request's last byte to the write of the first token."""
    gaps_s: list[float] = field(default_factory=list)
    """Between writes of tokens."""
    whole_s: float = 0.0
    """To the last write."""


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A running server."""

    address: str
    """host:port"""
    peer: Peer

    async def records(self) -> list[KnownAnswer]:
        """Returns the records of answers that ended since the last call."""
        return [KnownAnswer(**each) for each in (await self.peer.ask())["records"]]


@asynccontextmanager
async def known(latencies: Latencies, core: int | None = None) -> AsyncIterator[KnownServer]:
    """Runs the server. Raises ContenderFailed if it does not start."""
    async with peer(serve_known, core) as server:
        port = (await server.ask(latencies=asdict(latencies)))["port"]
        yield KnownServer(f"127.0.0.1:{port}", server)


async def serve_known() -> None:
    """The first command has latencies, and is answered with the port; each later one is answered
    with the new records."""
    states: list[_Shared] = []

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        if states:
            records, states[0].records = states[0].records, []
            return {"records": [asdict(record) for record in records]}
        states.append(_Shared(Latencies(**command["latencies"])))
        listening = await asyncio.get_running_loop().create_server(
            lambda: _KnownConnection(states[0]), "127.0.0.1", 0, backlog=4096
        )
        return {"port": listening.sockets[0].getsockname()[1]}

    await answer(handle)


class _Shared:
    """State shared by the server's connections."""

    def __init__(self, latencies: Latencies) -> None:
        self.latencies = latencies
        self.records: list[KnownAnswer] = []
        self.count = 0
        self._draw = random.Random(latencies.seed)

    def drawn(self, median_s: float) -> float:
        return median_s * self._draw.lognormvariate(0.0, self.latencies.spread)


class _KnownConnection(asyncio.Protocol):
    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._gone = False
        self._prompt_tokens = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        self._parser = httptools.HttpRequestParser(self)
        self._answer(json.loads(body), perf_counter())

    def _answer(self, asked: dict[str, Any], arrived: float) -> None:
        shared, latencies = self._shared, self._shared.latencies
        shared.count += 1

        def due(every: int) -> bool:
            return bool(every) and shared.count % every == 0

        if due(latencies.refuse_every):
            return self._empty(429, b"retry-after: 1\r\n")
        if due(latencies.fail_every):
            return self._empty(500)
        close = due(latencies.close_every)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n%b\r\n" % (b"connection: close\r\n" if close else b"")
        )
        tokens = min(MOST_TOKENS, asked["max_tokens"])
        ends = 1 if due(latencies.cut_every) else tokens
        self._prompt_tokens = len(asked["prompt"])
        self._later(
            shared.drawn(latencies.first_s), self._token, arrived, None, tokens, ends, close
        )

    def _token(
        self, arrived: float, record: KnownAnswer | None, tokens: int, ends: int, close: bool
    ) -> None:
        """Writes one more of `tokens`. After the last of `ends` the connection breaks if the answer
        has more tokens."""
        if self._gone:
            return
        now = perf_counter()
        if record is None:
            record = KnownAnswer(now - arrived)
        else:
            record.gaps_s.append(now - arrived - record.whole_s)
        record.whole_s = now - arrived
        given = len(record.gaps_s) + 1
        # An id that identifies the request and the token of its answer.
        token = 100 * self._prompt_tokens + given
        event = b'data: {"choices":[{"text":"a","token_ids":[%d]}]}\n\n' % token
        if given == ends < tokens:
            self._transport.write(_chunk(event))
            self._transport.close()
        elif given < tokens:
            self._transport.write(_chunk(event))
            delay_s = self._shared.drawn(self._shared.latencies.between_s)
            self._later(delay_s, self._token, arrived, record, tokens, ends, close)
        else:
            self._shared.records.append(record)
            self._transport.write(_chunk(event + b"data: [DONE]\n\n") + b"0\r\n\r\n")
            if close:
                self._transport.close()

    def _later(self, delay_s: float, what: Callable[..., None], *args: object) -> None:
        asyncio.get_running_loop().call_later(delay_s, what, *args)

    def _empty(self, status: int, headers: bytes = b"") -> None:
        head = b"HTTP/1.1 %d -\r\n%bcontent-length: 2\r\n\r\n{}"
        self._transport.write(head % (status, headers))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
