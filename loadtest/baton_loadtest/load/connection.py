"""One kept-alive HTTP/1.1 connection whose answers are read as they stream.

As little work for each piece as can be: what a load generator spends itself, it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from baton.cli.http_client import ConnectionLost, connecting


@dataclass(slots=True)
class Head:
    """status: 0 until it came. headers: names in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class Connection(asyncio.Protocol):
    """For one request at a time. Close it."""

    def __init__(self) -> None:
        self.usable = True
        """For a further request, as far as is known."""
        self.answered = False
        """Whether anything at all came of the last request."""
        self._parser = httptools.HttpResponseParser(self)
        self._hear: Callable[[bytes], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = Head()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, host: str, port: int, trust: ssl.SSLContext | None = None) -> Connection:
        """Raises Unreachable, or InvalidArgument for a certificate that is not trusted."""
        loop = asyncio.get_running_loop()
        async with connecting():
            _, connection = await loop.create_connection(cls, host, port, ssl=trust)
        return connection

    async def ask(self, request: bytes, hear: Callable[[bytes], None]) -> Head:
        """Returns when the answer ended. hear: gets pieces of a body as they come, but only of
        status 200; it must not raise.

        Raises ConnectionLost; then, and when it is cancelled, the connection is of no more use.
        """
        if not self.usable or self._transport is None:
            raise ConnectionLost
        self._head, self._hear, self.answered = Head(), hear, False
        self._done = asyncio.get_running_loop().create_future()
        whole = False
        try:
            self._transport.write(request)
            await self._done
            whole = True
        finally:
            self._done = self._hear = None
            if not whole:
                self.close()
        return self._head

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lost()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _lost(self) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLost())
        if self._transport is not None:
            self._transport.abort()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head.status = self._parser.get_status_code()
        if self._head.status != 200:
            self._hear = None

    def on_body(self, part: bytes) -> None:
        if self._hear is not None:
            self._hear(part)

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
