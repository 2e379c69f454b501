"""Sends requests over HTTP/1.1 on connections that are kept alive.

Many at a time, each on a connection of its own; whoever calls bounds how many.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httptools

from baton.cli.access import Access
from baton.core.errors import InvalidArgument
from baton.rpc.address import split

CONNECT_S = 5.0
READ_BYTES = 1 << 16
CLOSE_S = 1.0


class Unreachable(ConnectionError):
    """No connection can be made: the request was not sent."""


class ConnectionLost(ConnectionError):
    """The connection ended, or said nonsense, before the answer did."""


@asynccontextmanager
async def connecting() -> AsyncIterator[None]:
    """Bounds the making of a connection. Raises Unreachable, or InvalidArgument for a certificate
    that is not trusted."""
    try:
        async with asyncio.timeout(CONNECT_S):
            yield
    except ssl.SSLCertVerificationError:
        raise InvalidArgument(
            "the server's certificate is not one of a CA that is trusted", field="ca"
        ) from None
    except (OSError, TimeoutError):
        raise Unreachable from None


@dataclass(slots=True)
class Answer:
    """headers: names in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class HttpClient:
    """Of one server. Close it."""

    def __init__(self, access: Access) -> None:
        """Raises InvalidArgument for what is no address, and for a CA that is none."""
        self.address = access.address
        self._host, self._port = split(access.address, "http")
        self._trust = trust(access.ca)
        key = f"authorization: Bearer {access.key}\r\n" if access.key else ""
        self._head = f"host: {access.address}\r\n{key}content-type: application/json\r\n"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, timeout_s: float) -> Answer:
        """The whole answer, whatever its status. Raises Unreachable, ConnectionLost, or
        TimeoutError; then its connection is gone."""
        head = f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        return await self._ask(head.encode() + body, timeout_s)

    async def get(self, path: str, timeout_s: float) -> Answer:
        """As `post`."""
        return await self._ask(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode(), timeout_s)

    async def _ask(self, request: bytes, timeout_s: float) -> Answer:
        connection = await self._connection()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.ask(request)
        except BaseException:
            connection.abort()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    async def close(self) -> None:
        for connection in self._idle:
            await connection.close()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        async with connecting():
            streams = await asyncio.open_connection(self._host, self._port, ssl=self._trust)
        return _Connection(*streams)


class _Connection:
    """For one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._keep = True

    @property
    def usable(self) -> bool:
        """As far as is known: the server may be closing it at this moment."""
        return self._keep and not self._reader.at_eof() and not self._writer.is_closing()

    async def ask(self, request: bytes) -> Answer:
        reading = _Reading()
        parser = httptools.HttpResponseParser(reading)
        try:
            self._writer.write(request)
            await self._writer.drain()
            while not reading.whole:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise ConnectionLost
                parser.feed_data(data)
        except (OSError, httptools.HttpParserError):
            raise ConnectionLost from None
        self._keep = parser.should_keep_alive()
        reading.answer.status = parser.get_status_code()
        reading.answer.body = b"".join(reading.parts)
        return reading.answer

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_S)


class _Reading:
    """What the parser calls."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.parts: list[bytes] = []
        self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.whole = True


def trust(ca: bytes | None) -> ssl.SSLContext | None:
    """ca: as Access has it. Raises InvalidArgument."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cadata=ca.decode() if ca else None)
    except (ssl.SSLError, ValueError):
        raise InvalidArgument("is no PEM file of a CA", field="ca") from None
