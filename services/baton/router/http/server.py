"""Listens for HTTP inside the running event loop; starts nothing of its own and never exits.

uvicorn's protocol without uvicorn's server: that one installs signal handlers, polls ten times a
second and ends the process when a port is taken.
"""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from baton.router.http.limits import Connected, HttpLimits
from baton.router.http.protocol import LimitedProtocol
from baton.rpc.address import join, refusal, split
from baton.rpc.tls import Certificates

_FIELD = "http_listen"
_BACKLOG = 1024


class HttpServer:
    """A listening server. address: host:port as bound, with the real port where 0 was asked for."""

    def __init__(
        self, server: asyncio.Server, state: ServerState, connected: Connected, address: str
    ):
        self.address = address
        self._server = server
        self._state = state
        self._connected = connected

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    def leave(self) -> None:
        """From now on every answer is its connection's last. Connections are still taken.

        One whose answer has begun already says nothing of it: the connection waits for another
        request, which may be on its way as the answer ends.
        """
        self._connected.leaving = True

    def end_idle(self) -> None:
        """Connections without a request end, the others with the answer they are at."""
        self._connected.ending = True
        for connection in list(self._state.connections):
            # A server's connections are those its factory made.
            assert isinstance(connection, LimitedProtocol)
            connection.end_if_idle()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stops listening, lets running answers end for grace_s, then cancels them.

        Afterwards no connection and no task is left. Idempotent.
        """
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        left = set(self._state.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._server.wait_closed()


async def serve_http(
    app: ASGIApp,
    listen: str,
    *,
    limits: HttpLimits | None = None,
    certificates: Certificates | None = None,
) -> HttpServer:
    """Serves app on listen ("host:port"; "[::1]:port"; port 0 takes a free one).

    certificates: speaks TLS 1.2 or later. A handshake has as long as the head of a request.

    Raises PortInUse when something else listens there, InvalidArgument when listen is no address
    of this machine; both name the field http_listen.
    """
    limits = limits or HttpLimits()
    host, port = split(listen, _FIELD)
    config = Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(limits.keep_alive_s),
    )
    config.load()
    state, connected = ServerState(), Connected()
    protocol = functools.partial(
        LimitedProtocol, limits, connected, config=config, server_state=state, app_state={}
    )
    tls: dict[str, Any] = {}
    if certificates is not None:
        tls["ssl"] = certificates.server_context()
        tls["ssl_handshake_timeout"] = limits.head_timeout_s
    try:
        server = await asyncio.get_running_loop().create_server(
            protocol, host, port, backlog=_BACKLOG, **tls
        )
    except OSError as error:
        raise refusal(error, listen, _FIELD) from None
    bound_host, bound_port = server.sockets[0].getsockname()[:2]
    return HttpServer(server, state, connected, join(bound_host, bound_port))
