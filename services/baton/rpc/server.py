"""One process's gRPC server: its services, health and reflection.

The port is bound by `start`, when everything is loaded: that is what health's "startup" tells.
Readiness is told by `set_serving`, and liveness ("") answers as long as the event loop does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.errors import Internal
from baton.rpc import options, peer_token
from baton.rpc.address import PortInUse as PortInUse
from baton.rpc.address import check, is_loopback, join, split
from baton.rpc.interceptors import Check, ErrorInterceptor
from baton.rpc.metrics import TASKS, gauge
from baton.rpc.probes import Probes
from baton.rpc.roles import check_caller
from baton.rpc.tls import Certificates
from baton.rpc.transport import bind

# Ends the listening of a port while its connections go on.
#
# gRPC for Python cannot do that: its `Server.stop` also throws away calls that have arrived and
# were not begun, whose callers then read CANCELLED.


def stop_listening(port: int) -> int:
    """Whoever connects to a TCP port of this process from now on is refused. Returns how many
    sockets listened there.
    """
    return sum(_end(descriptor, port) for descriptor in _descriptors())


def _descriptors() -> list[int]:
    # Not /proc/self/fd, which only Linux has.
    return [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]


def _end(descriptor: int, port: int) -> bool:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False  # closed meanwhile, or no socket
    with copy:
        try:
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens or copy.getsockname()[1:2] != (port,):
                return False
            # Of the socket itself, so gRPC's own descriptor stops too.
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


log = logging.getLogger(__name__)

SETTLE_S = 0.2
"""What a goodbye takes to reach a client, and the client's last calls to reach us."""


@dataclass(frozen=True, slots=True)
class Service:
    """name: full gRPC service name, as "baton.v1.Decode". register: adds the servicer."""

    name: str
    register: Callable[[grpc.aio.Server], None]


class ProcessServer:
    """Serves until stopped. Made, started and stopped on one event loop."""

    def __init__(
        self,
        *,
        listen: str,
        services: Sequence[Service],
        reflection: bool = True,
        probes: Probes | None = None,
        public: bool = False,
        limits: options.PublicLimits | None = None,
        field: str = "listen",
        certificates: Certificates | None = None,
        token: str = "",
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """public: others than Baton's own may call, so messages, streams and connections are
        limited, by limits.

        field: the option that `listen` came from, for errors to name. certificates: speaks TLS;
        callers that are Baton's own are then held to `baton.rpc.roles`. token: what they have to
        show, see `baton.rpc.peer_token`; empty: nothing. interceptors: see the call before the
        services do; what they raise reaches the caller as a handler's error does.
        probes: opened by `start` where they are not yet, and closed by `stop`. None: there are no
        ports besides `listen`.
        """
        self._listen = listen
        self._field = field
        self._services = tuple(services)
        self._reflection = reflection
        self._probes = probes or Probes()
        self._public = public
        self._limits = (limits or options.PublicLimits()) if public else None
        self._arguments = options.INTERNAL_SERVER
        if self._limits is not None:
            self._arguments = options.public_server(self._limits)
        self._certificates = certificates
        self._token = token
        self._interceptors = tuple(interceptors)
        self._health = self._probes.health
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._untell: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._probes.metrics_address

    async def start(self) -> str:
        """Binds and serves; not ready yet. Returns the actual "host:port".

        Raises PortInUse or InvalidArgument naming the option; nothing stays bound.
        """
        # The pure-Python parser recurses without a bound on hostile input.
        if api_implementation.Type() != "upb":
            raise Internal("protobuf runs without its C parser (upb); install a binary wheel")
        host, _ = split(self._listen, self._field)
        if not (self._public or self._certificates or is_loopback(host)):
            log.warning(
                "%s is plain text%s: whoever %s can use this worker (--tls-cert, --tls-key and "
                "--tls-ca end that)",
                self._listen,
                "" if self._token else " and asks nobody who they are",
                "reads the network" if self._token else "reaches it",
            )
        # Asked first, because gRPC does not say why a port cannot be had.
        check(self._listen, self._field)
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(*self._checks()), *self._interceptors],
            options=self._arguments,
        )
        for service in self._services:
            service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.name for service in self._services]
        if self._reflection:
            reflection.enable_server_reflection(
                (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )
        # Before the port is bound: a server that never started keeps its port.
        await self._probes.open()
        try:
            self._port = self._bind(server)
            await server.start()
        except BaseException:
            await self._probes.close()
            raise
        self._server = server
        self._health.set_started(names)
        loop = asyncio.get_running_loop()
        self._untell = gauge(TASKS, lambda: {(): len(asyncio.all_tasks(loop))})
        return join(host, self._port)

    @property
    def goodbye_s(self) -> float:
        """What `send_away` takes."""
        return 0.0 if self._limits is None else options.longest_age_s(self._limits) + SETTLE_S

    def set_serving(self, serving: bool) -> None:
        """Readiness of all services, as health tells it. Liveness is not touched. Without effect
        after `leave`.
        """
        self._health.set_serving(serving)

    def leave(self) -> None:
        """Not ready from now on, for good. Calls are still taken."""
        self._health.leave()

    async def send_away(self) -> None:
        """Refuses new connections, and returns when each of the others has been told to connect
        elsewhere. What they send before they hear it is answered as ever.

        Takes as long as a public connection may grow old: that age is what tells them.
        """
        if self._server is not None and self._limits is not None:
            stop_listening(self._port)
            await asyncio.sleep(self.goodbye_s)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` to end, cancels the rest. Idempotent."""
        self.leave()
        server, self._server = self._server, None
        untell, self._untell = self._untell, lambda: None
        untell()
        try:
            if server is not None:
                await server.stop(grace_s)
        finally:
            # Last, so that probes are answered for as long as anybody is.
            await self._probes.close()

    def _checks(self) -> Iterator[Check]:
        if self._public:
            return
        if self._certificates is not None:
            yield check_caller
        if self._token:
            yield peer_token.checking(self._token)

    def _bind(self, server: grpc.aio.Server) -> int:
        try:
            return bind(server, self._listen, self._certificates)
        except RuntimeError:
            raise PortInUse(f"cannot listen on {self._listen}", field=self._field) from None
