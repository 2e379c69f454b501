"""Server-sent events over raw ASGI: framing, comments against idle proxies, and the end.

Knows JSON documents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from starlette.types import Send

from baton.router.api.http.respond import Header, Json, encode

KEEP_ALIVE_S = 10.0
FAREWELL_S = 0.5
"""What a client gets to take the last event when the server closes."""

log = logging.getLogger(__name__)

_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold back events until its buffer is full.
    (b"x-accel-buffering", b"no"),
)


class EventWriter:
    """Writes one stream. Each `send` carries whole events, so several tasks may write.

    `send` waits while the client reads slowly; what is new meanwhile is coalesced at the source.
    """

    def __init__(self, send: Send):
        self._send = send
        self._idle = True
        self._open = False

    async def start(self, headers: Sequence[Header]) -> None:
        head = [*_HEAD, *headers]
        self._open = True
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, documents: Iterable[Json]) -> None:
        if events := b"".join(b"data: %b\n\n" % encode(each) for each in documents):
            await self.write_events(events)

    async def write_events(self, events: bytes) -> None:
        """Whole events, framed."""
        self._idle = False
        await self._body(events)

    async def end(self, last: Json | None = None) -> None:
        """Ends the stream: with [DONE], or with an error document in its place."""
        data = b"[DONE]" if last is None else encode(last)
        event = b"data: %b\n\n" % data
        self._open = False
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def break_off(self, error: Json) -> None:
        """Ends a stream that has begun and has no end yet, with an error. Bounded, and without
        effect where nobody takes it."""
        if not self._open:
            return
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.end(error)
        except Exception as failure:
            log.debug("a client was not told that its stream ends: %r", failure)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Within, a comment goes out whenever nothing did for KEEP_ALIVE_S."""
        ticker = asyncio.ensure_future(self._tick())
        try:
            yield
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._idle:
                await self._body(b": keep-alive\n\n")
            self._idle = True

    async def _body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
