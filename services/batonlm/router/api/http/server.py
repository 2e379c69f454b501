"""Serves HTTP inside the running event loop, with granian and additions to it.

granian (hyper) parses HTTP/1.1 and HTTP/2, speaks TLS and bounds what it reads. `Edge` wraps the
application: a request has one valid Host and a body that is framed unambiguously and arrives in
time; connections per address are limited; an answer announces that it is its connection's last; and
a truncated request gets a client error. `Connections` ends connections that exceed their limits. No
private name of granian's is used (decision 036).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import secrets
from typing import Any

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings, HTTP2Settings
from granian.server.embed import Server
from starlette.types import ASGIApp, Receive, Scope, Send

from batonlm.router.api.http.app import fail
from batonlm.router.api.http.connections import (
    Connection,
    Connections,
    Exchange,
    HttpLimits,
    close_left_over,
    tune_listeners,
)
from batonlm.router.api.http.responses import CLOSES, HttpError
from batonlm.rpc.address import claimed, join, refusal, split
from batonlm.rpc.tls import Certificates, Pems

log = logging.getLogger(__name__)

_FIELD = "http_listen"
_BACKLOG = 1024
START_S = 10.0
"""Upper bound; the server listens a few milliseconds after its start."""
FLUSH_S = 1.0
"""How long the last bytes may take to reach the clients."""
THREADS_S = 1.0
"""Upper bound; the server's threads end about a millisecond after it."""
END_S = 5.0
"""Upper bound; the server ends as soon as all its connections have."""
SEND_BUFFER_BYTES = 64 << 10
"""Bytes of one HTTP/2 stream's answer that the server buffers for a slow client."""
WINDOW_BYTES = 256 << 10
"""Bytes that an HTTP/2 client may send ahead of the application."""
_LOGGING = {
    # Changes only levels; otherwise logging would close every handler of the process.
    "incremental": True,
    "formatters": {},
    "handlers": {},
    "loggers": {"_granian": {"level": "CRITICAL"}, "granian.access": {"level": "CRITICAL"}},
}

BAD_HOST = HttpError(400, "one valid Host header is required", code="bad_request")
BAD_FRAMING = HttpError(400, "Transfer-Encoding must be chunked", code="bad_request")
BROKEN_BODY = HttpError(400, "the body is incomplete or malformed", code="bad_request")
BODY_TOO_SLOW = HttpError(408, "the body did not arrive in time", code="request_timeout")
TOO_MANY_OF_YOURS = HttpError(
    429,
    "too many connections from this address",
    code="too_many_connections",
    headers=(*CLOSES, (b"retry-after", b"1")),
)

(_CLOSE,) = CLOSES

# RFC 9112, section 3.2, by RFC 3986's uri-host.
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)"
    rb"(?::[0-9]*)?"
)


class Edge:
    """Wraps an application that answers every HttpError that `receive` raises."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, connections: Connections) -> None:
        self._app = app
        self._limits = limits
        self._connections = connections
        self._now = asyncio.get_running_loop().time
        self._running: set[asyncio.Task[Any]] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        """Tasks that were cancelled here."""

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
            sending = self._sender(send, connection, exchange)
            if (refusal := self._refusal(scope, connection)) is not None:
                await self._fail(scope, sending, refusal)
            else:
                await self._app(scope, self._receiver(receive), sending)
                if not exchange.started:
                    # The body was truncated or invalid. The server would report its own failure.
                    await self._fail(scope, sending, BROKEN_BODY)
        except asyncio.CancelledError:
            # Returns normally, because the server would log a cancellation as a failure.
            if task not in self._abandoned:
                raise
        finally:
            self._running.discard(task)
            self._abandoned.discard(task)
            self._connections.end(connection, exchange)

    async def _fail(self, scope: Scope, send: Send, error: HttpError) -> None:
        await fail(scope, send, error, secrets.token_hex(16))

    async def finish(self, grace_s: float) -> None:
        """Lets running requests end for this many seconds, then cancels the others."""
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
        # Only HTTP/1.0 allows a request without Host.
        if len(hosts) > 1 or not ((hosts and hosts[0]) or scope["http_version"] == "1.0"):
            return BAD_HOST
        if hosts and hosts[0] and not _HOST.fullmatch(hosts[0]):
            return BAD_HOST
        for name, value in scope["headers"]:
            if name == b"transfer-encoding" and value.strip(b" \t").lower() != b"chunked":
                return BAD_FRAMING
        return TOO_MANY_OF_YOURS if self._connections.too_many(connection) else None

    def _sender(self, send: Send, connection: Connection, exchange: Exchange) -> Send:
        """Wraps `send`: announces the last answer of a connection, and records since when a part is
        being sent."""

        async def send_part(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                # HTTP/2 has no such header; its connections end when they are idle.
                if connection.http2:
                    message["headers"] = [each for each in message["headers"] if each != _CLOSE]
                else:
                    if self._connections.is_last(connection) and _CLOSE not in message["headers"]:
                        message["headers"] = [*message["headers"], _CLOSE]
                    connection.last = _CLOSE in message["headers"]
                await send(message)
                return
            exchange.sending_since = self._now()
            try:
                await send(message)
            finally:
                exchange.sending_since = None

        return send_part

    def _receiver(self, receive: Receive) -> Receive:
        """Wraps `receive`: raises BODY_TOO_SLOW when the body arrives too slowly."""
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


class HttpServer:
    """A listening server."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits,
        certificates: Certificates | None,
    ) -> None:
        self.address = join(host, port)
        """The bound address, with the real port where 0 was given."""
        self._host, self._port = host, port
        self._limits = limits
        self._certificates = certificates
        self._pems: Pems | None = None
        self._connections = Connections(host, port, limits, asyncio.get_running_loop().time)
        self._edge = Edge(app, limits, self._connections)
        self._serving: list[tuple[Server, asyncio.Task[None]]] = []
        """The last one accepts connections; earlier ones, with older certificates, finish theirs.
        """
        self._threads: set[str] = set()
        """Thread ids that appeared while a server started: its threads, and possibly others."""
        self._looking: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        self._connections.look()
        return len(self._connections)

    async def start(self) -> None:
        """Returns when connections are accepted."""
        await self._start_serving()
        self._looking = asyncio.create_task(self._look())

    def leave(self) -> None:
        """From now on every answer is its connection's last. Connections are still accepted.

        An answer that has begun cannot announce it: its connection waits for another request, which
        may be on its way as the answer ends. HTTP/2 has no such header: its connections end when
        they are idle.
        """
        self._connections.leaving = True

    def end_idle(self) -> None:
        """Connections without a request end now, the others with their current answer."""
        self._connections.leaving = True
        self._connections.end_idle()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stops listening, lets running answers end for grace_s, then cancels them.

        Afterwards no connection and no task is left. Idempotent.
        """
        self._connections.leaving = True
        for server, _ in self._serving:
            server.stop()
        await self._edge.finish(grace_s)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        await self._end_serving()
        close_left_over(self._host, self._port)

    async def _start_serving(self) -> None:
        server, before = self._new_server(), _threads()
        task = asyncio.create_task(server.serve())
        self._serving.append((server, task))
        async with asyncio.timeout(START_S):
            while not tune_listeners(self._host, self._port, self._limits.stall_timeout_s):
                await asyncio.wait({task}, timeout=0.001)
                if task.done():
                    raise RuntimeError("the HTTP server ended as it started") from task.exception()
        self._threads |= _threads() - before

    async def _end_serving(self) -> None:
        """Ends all connections, and with them the servers, which wait for theirs."""
        loop = asyncio.get_running_loop()
        until = loop.time() + END_S
        if self._serving:
            await asyncio.wait({task for _, task in self._serving}, timeout=FLUSH_S)
        while ending := {task for _, task in self._serving if not task.done()}:
            self._connections.end_all()
            await asyncio.wait(ending, timeout=0.05)
            if loop.time() > until:
                log.error("the HTTP server did not end within %s s", END_S)
                break
        for _, task in self._serving:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._serving), return_exceptions=True)
        self._serving.clear()
        # The server reports its end shortly before its threads release Python objects. An
        # interpreter that exits in that moment aborts (SIGABRT).
        until = loop.time() + THREADS_S
        while self._threads & _threads() and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._threads.clear()

    def _new_server(self) -> Server:
        limits = self._limits
        tls: dict[str, Any] = {}
        if self._certificates is not None:
            self._pems = self._certificates.current()
            tls = {
                "ssl_cert": self._certificates.cert,
                "ssl_key": self._certificates.key,
                "ssl_protocol_min": SSLProtocols.tls12,
            }
            if self._certificates.ca is not None:
                tls |= {"ssl_ca": self._certificates.ca, "ssl_client_verify": True}
        return Server(
            self._edge,
            address=self._host,
            port=self._port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            websockets=False,
            backlog=_BACKLOG,
            backpressure=limits.max_connections,
            http1_settings=HTTP1Settings(
                # granian has one timer for a head and for the time between requests; `Connections`
                # is stricter with a head that has begun.
                header_read_timeout=max(1, round(limits.keep_alive_s * 1000)),
                max_buffer_size=limits.max_head_bytes,
            ),
            http2_settings=HTTP2Settings(
                max_headers_size=limits.max_head_bytes,
                max_concurrent_streams=limits.max_streams,
                max_send_buffer_size=SEND_BUFFER_BYTES,
                initial_connection_window_size=WINDOW_BYTES,
                initial_stream_window_size=WINDOW_BYTES,
            ),
            log_enabled=False,
            log_dictconfig=_LOGGING,
            **tls,
        )

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._connections.interval_s())
            try:
                self._connections.look()
                await self._follow_certificates()
            except Exception:
                log.exception("looking after HTTP connections failed")

    async def _follow_certificates(self) -> None:
        """Starts another server with changed certificates for new connections, beside the one that
        finishes its own."""
        if self._certificates is None or self._certificates.current() is self._pems:
            return
        before = list(self._serving)
        await self._start_serving()
        for server, _ in before:
            server.stop()
        self._serving = [(s, task) for s, task in self._serving if not task.done()]


async def serve_http(
    app: ASGIApp,
    listen: str,
    *,
    limits: HttpLimits | None = None,
    certificates: Certificates | None = None,
    shared: bool = False,
) -> HttpServer:
    """Serves app on listen ("host:port"; "[::1]:port"; port 0 takes a free one).

    app: answers an HttpError that `receive` raises. certificates: speaks TLS 1.2 or later. shared:
    other processes of this user may listen there, too, and the kernel shares out connections.

    Raises PortInUse when another process listens there, InvalidArgument when listen is no address
    of this machine; both name the field http_listen.
    """
    # granian shares its port with any process that also sets SO_REUSEPORT, hence the claim.
    with claimed(listen, _FIELD, shared=shared) as (_, bound):
        server = HttpServer(app, *split(bound, _FIELD), limits or HttpLimits(), certificates)
        try:
            await server.start()
        except OSError as error:
            raise refusal(error, listen, _FIELD) from None
    return server


def _threads() -> set[str]:
    """Returns the operating system's ids of this process's threads, including native ones."""
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()
