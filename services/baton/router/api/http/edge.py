"""What stands between the HTTP server and the application: an ASGI wrapper around every request.

The server parses; the application answers. Here is what neither does: a request has one valid Host
and a body that is framed in one way and arrives in time; an address has so many connections; an
answer says when it is its connection's last; and whoever is cut off in mid-request is answered with
a client's error. `Connections` has the part that no request shows.
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.api.http.connections import Connection, Connections, Exchange
from baton.router.api.http.errors import HttpError
from baton.router.api.http.limits import (
    BAD_FRAMING,
    BAD_HOST,
    BODY_TOO_SLOW,
    BROKEN_BODY,
    TOO_MANY_OF_YOURS,
    HttpLimits,
)
from baton.router.api.http.respond import send_json

_CLOSE = (b"connection", b"close")

# RFC 9112, section 3.2, by RFC 3986's uri-host.
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)"
    rb"(?::[0-9]*)?"
)


class Edge:
    """Wraps an application that answers every HttpError which it meets in `receive`."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, connections: Connections) -> None:
        self._app = app
        self._limits = limits
        self._connections = connections
        self._now = asyncio.get_running_loop().time
        self._running: set[asyncio.Task[Any]] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        """Cancelled here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        host, port = scope["client"]
        http2 = scope["http_version"] == "2"
        connection, exchange = self._connections.begin(
            host, int(port), functools.partial(self._abandon, task), http2=http2
        )
        self._running.add(task)
        try:
            sending = _Sender(send, self._connections, connection, exchange)
            if (refusal := self._refusal(scope, connection)) is not None:
                headers = [] if http2 else [_CLOSE]
                if refusal.status == 429:
                    headers.append((b"retry-after", b"1"))
                await send_json(sending, refusal.status, refusal.body(), headers)
            else:
                await self._app(scope, self._receiver(receive), sending)
                if not sending.started:
                    # The body broke off, or was none. The server would call it its own failure.
                    await send_json(sending, 400, BROKEN_BODY.body(), [] if http2 else [_CLOSE])
        except asyncio.CancelledError:
            # Not a failure to the server, which would log it as one.
            if task not in self._abandoned:
                raise
        finally:
            self._running.discard(task)
            self._abandoned.discard(task)
            self._connections.end(connection, exchange)

    async def finish(self, grace_s: float) -> None:
        """Lets running requests end for so long, and cancels the others."""
        if self._running and grace_s > 0:
            await asyncio.wait(set(self._running), timeout=grace_s)
        left = set(self._running)
        for task in left:
            self._abandon(task)
        if left:
            await asyncio.wait(left)

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        if task in self._running:
            self._abandoned.add(task)
            task.cancel()

    def _refusal(self, scope: Scope, connection: Connection) -> HttpError | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        # Nobody but HTTP/1.0 may leave it out.
        if len(hosts) > 1 or not ((hosts and hosts[0]) or scope["http_version"] == "1.0"):
            return BAD_HOST
        if hosts and hosts[0] and not _HOST.fullmatch(hosts[0]):
            return BAD_HOST
        for name, value in scope["headers"]:
            if name == b"transfer-encoding" and value.strip(b" \t").lower() != b"chunked":
                return BAD_FRAMING
        return TOO_MANY_OF_YOURS if self._connections.too_many(connection) else None

    def _receiver(self, receive: Receive) -> Receive:
        """Raises BODY_TOO_SLOW when too little has come for the time that it took."""
        limits = self._limits
        began, received, complete = self._now(), 0, False

        async def receive_in_time() -> Any:
            nonlocal received, complete
            if complete:
                return await receive()
            rate_s = limits.body_start_s + received / limits.body_bytes_per_s
            try:
                async with asyncio.timeout_at(began + min(rate_s, limits.body_timeout_s)):
                    message = await receive()
            except TimeoutError:
                raise BODY_TOO_SLOW from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            return message

        return receive_in_time


class _Sender:
    """`send` of one request. started: whether an answer has begun."""

    def __init__(
        self, send: Send, connections: Connections, connection: Connection, exchange: Exchange
    ) -> None:
        self.started = False
        self._send = send
        self._connections = connections
        self._connection = connection
        self._exchange = exchange
        self._now = asyncio.get_running_loop().time

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            # HTTP/2 has no such header: its connections end when they are idle.
            if not self._connection.http2:
                if self._connections.is_last(self._connection) and _CLOSE not in message["headers"]:
                    message["headers"] = [*message["headers"], _CLOSE]
                self._connection.last = _CLOSE in message["headers"]
            await self._send(message)
            return
        self._exchange.sending_since = self._now()
        try:
            await self._send(message)
        finally:
            self._exchange.sending_since = None
