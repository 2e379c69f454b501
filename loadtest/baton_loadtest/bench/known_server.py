"""A server of streamed completions whose latencies are drawn, kept and recorded, in a process of
its own.

What a load generator says of it can so be compared with what really was. The first line it prints
is its port. `GET /records` returns what was recorded since the last time, and forgets it. Times are
in seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from baton.rpc.loop import Loop

MOST_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class Latencies:
    """first_s, between_s: medians; spread: of the logarithm. Every so many requests, counted from
    the first: refuse_every answers 429, fail_every 500, cut_every breaks off after the first token,
    close_every ends the connection after an answer. 0: never."""

    first_s: float = 0.08
    between_s: float = 0.02
    spread: float = 0.4
    seed: int = 0
    refuse_every: int = 0
    fail_every: int = 0
    cut_every: int = 0
    close_every: int = 0


@dataclass(slots=True)
class Record:
    """One answer in full. first_s: from the request's last byte to the first token's write; gaps_s:
    from one token's write to the next; whole_s: to the last write."""

    first_s: float
    gaps_s: list[float] = field(default_factory=list)
    whole_s: float = 0.0


class Server:
    """What its connections share."""

    def __init__(self, latencies: Latencies) -> None:
        self.latencies = latencies
        self.records: list[Record] = []
        self.count = 0
        self._draw = random.Random(latencies.seed)

    def drawn(self, median_s: float) -> float:
        return median_s * self._draw.lognormvariate(0.0, self.latencies.spread)


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._unread = b""
        self._gone = False
        self._prompt_tokens = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head, end, body = self._unread.partition(b"\r\n\r\n")
        if not end:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self._unread = body[length:]
        if head.startswith(b"GET /records "):
            records, self._server.records = self._server.records, []
            self._whole(200, json.dumps([asdict(record) for record in records]).encode())
        else:
            self._answer(json.loads(body[:length]), perf_counter())

    def _answer(self, asked: dict[str, Any], arrived: float) -> None:
        server, latencies = self._server, self._server.latencies
        server.count += 1

        def due(every: int) -> bool:
            return bool(every) and server.count % every == 0

        if due(latencies.refuse_every):
            return self._whole(429, b"{}", b"retry-after: 1\r\n")
        if due(latencies.fail_every):
            return self._whole(500, b"{}")
        close = due(latencies.close_every)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n%b\r\n" % (b"connection: close\r\n" if close else b"")
        )
        tokens = min(MOST_TOKENS, asked["max_tokens"])
        ends = 1 if due(latencies.cut_every) else tokens
        self._prompt_tokens = len(asked["prompt"])
        self._later(
            server.drawn(latencies.first_s), self._token, arrived, None, tokens, ends, close
        )

    def _token(
        self, arrived: float, record: Record | None, tokens: int, ends: int, close: bool
    ) -> None:
        """One more of `tokens`, after which the connection breaks off when it is the last of `ends`
        and the answer has more."""
        if self._gone:
            return
        now = perf_counter()
        if record is None:
            record = Record(now - arrived)
        else:
            record.gaps_s.append(now - arrived - record.whole_s)
        record.whole_s = now - arrived
        given = len(record.gaps_s) + 1
        # Tells apart whose answer it is, and which token of it.
        token = 100 * self._prompt_tokens + given
        event = b'data: {"choices":[{"text":"a","token_ids":[%d]}]}\n\n' % token
        if given == ends < tokens:
            self._transport.write(_chunk(event))
            self._transport.close()
            return
        if given < tokens:
            self._transport.write(_chunk(event))
            delay_s = self._server.drawn(self._server.latencies.between_s)
            self._later(delay_s, self._token, arrived, record, tokens, ends, close)
            return
        self._server.records.append(record)
        self._transport.write(_chunk(event + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        if close:
            self._transport.close()

    def _later(self, delay_s: float, what: Callable[..., None], *args: object) -> None:
        asyncio.get_running_loop().call_later(delay_s, what, *args)

    def _whole(self, status: int, body: bytes, headers: bytes = b"") -> None:
        self._transport.write(
            b"HTTP/1.1 %d -\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)
        )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(latencies: Latencies) -> None:
    """Until stdin ends: whoever started it is gone then."""
    loop = asyncio.get_running_loop()
    server = Server(latencies)
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)
    gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), gone.set)
    await gone.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=Loop) as _runner:
        _runner.run(_serve(Latencies(**json.loads(sys.argv[1]))))
