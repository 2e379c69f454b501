"""An HTTP/1.1 client with kept-alive connections.

Concurrent requests each have their own connection; the caller limits their number.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException

import httptools

from batonlm.cli.access import Access
from batonlm.core.errors import InvalidArgument
from batonlm.rpc.address import split

CONNECT_S = 5.0
READ_BYTES = 1 << 16
CLOSE_S = 1.0


class Unreachable(ConnectionError):
    """No connection can be made; the request was not sent."""


class ConnectionLost(ConnectionError):
    """The connection ended, or was not valid HTTP, before the answer was complete."""


@asynccontextmanager
async def connecting() -> AsyncIterator[None]:
    """Limits the time to connect. Raises Unreachable, or InvalidArgument for a certificate that is
    not trusted."""
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
class HttpAnswer:
    """An answer with any status."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names are in lower case."""
    body: bytes = b""


class HttpClient:
    """A client of one server. Close it."""

    def __init__(self, access: Access) -> None:
        """Raises InvalidArgument for an invalid address or CA."""
        self.address = access.address
        self._host, self._port = split(access.address, "http")
        self._trust = trust(access.ca)
        key = f"authorization: Bearer {access.key}\r\n" if access.key else ""
        self._head = f"host: {access.address}\r\n{key}content-type: application/json\r\n"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, timeout_s: float) -> HttpAnswer:
        """Returns the whole answer, whatever its status. Raises Unreachable, ConnectionLost, or
        TimeoutError, and closes the connection then."""
        head = f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        return await self._ask(head.encode() + body, timeout_s)

    async def get(self, path: str, timeout_s: float) -> HttpAnswer:
        """See `post`."""
        return await self._ask(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode(), timeout_s)

    async def _ask(self, request: bytes, timeout_s: float) -> HttpAnswer:
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
    """A connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._keep = True

    @property
    def usable(self) -> bool:
        """Whether it seems open; the server may be closing it at this moment."""
        return self._keep and not self._reader.at_eof() and not self._writer.is_closing()

    async def ask(self, request: bytes) -> HttpAnswer:
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
    """The parser's callbacks."""

    def __init__(self) -> None:
        self.answer = HttpAnswer()
        self.parts: list[bytes] = []
        self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.whole = True


def trust(ca: bytes | None) -> ssl.SSLContext | None:
    """Returns the TLS context for a CA as in Access. Raises InvalidArgument."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cadata=ca.decode() if ca else None)
    except (ssl.SSLError, ValueError):
        raise InvalidArgument("is no PEM file of a CA", field="ca") from None


TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20


def scrape(
    url: str,
    *,
    trust: ssl.SSLContext | None = None,
    key: str = "",
    timeout_s: float = TIMEOUT_S,
) -> dict[str, float]:
    """Returns all samples of a process's /metrics, by name and labels as written there. Blocks.
    Raises OSError, and ValueError for text that is not in the metrics format.

    key: an API key, the token of Baton's own processes, or "".
    """
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(asked, timeout=timeout_s, context=trust) as answer:
        lines = answer.read(MAX_BYTES).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {sample: float(value) for sample, value in pairs}


def total(found: Mapping[str, float], name: str, *labels: str) -> float:
    """Returns the sum of a metric's samples that have all these labels (`key="value"`)."""
    return sum(
        value
        for sample, value in found.items()
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )


def met(url: str, trust: ssl.SSLContext | None, key: str = "") -> Counter[str]:
    """Returns how many workers of each role a router is connected to; none if it does not answer.
    Blocks."""
    try:
        found = scrape(url, trust=trust, key=key, timeout_s=2.0)
    except (OSError, HTTPException, ValueError):
        return Counter()
    serving = (_SERVING.fullmatch(sample) for sample in found)
    return Counter({one[1]: int(found[one[0]]) for one in serving if one and found[one[0]]})


_SERVING = re.compile(r'baton_workers\{role="(\w+)",state="serving"\}')
