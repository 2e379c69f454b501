"""One process's gRPC server: its services, health, reflection and metrics; knows no business.

The port is bound by `start`, readiness is told by `set_serving`, and liveness ("") answers as long
as the event loop does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core.errors import Internal
from baton.rpc import options
from baton.rpc.address import PortInUse as PortInUse
from baton.rpc.address import check, join, split
from baton.rpc.health import Health
from baton.rpc.interceptors import ErrorInterceptor
from baton.rpc.metrics import TASKS, gauge, serve_metrics
from baton.rpc.scrape import MetricsServer


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
        metrics_listen: str = "",
        public: bool = False,
        field: str = "listen",
    ) -> None:
        """public: others than Baton's own may call, so messages and streams are limited.

        field: the option that `listen` came from, for errors to name.
        """
        self._listen = listen
        self._field = field
        self._services = tuple(services)
        self._reflection = reflection
        self._metrics_listen = metrics_listen
        self._public = public
        self._health = Health([service.name for service in services])
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self._untell: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._metrics.address if self._metrics else ""

    async def start(self) -> str:
        """Binds and serves; not ready yet. Returns the actual "host:port".

        Raises PortInUse or InvalidArgument naming the option; nothing stays bound.
        """
        # The pure-Python parser recurses without a bound on hostile input.
        if api_implementation.Type() != "upb":
            raise Internal("protobuf runs without its C parser (upb); install a binary wheel")
        host, _ = split(self._listen, self._field)
        # Asked first, because gRPC does not say why a port cannot be had.
        check(self._listen, self._field)
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=options.PUBLIC_SERVER if self._public else options.INTERNAL_SERVER,
        )
        for service in self._services:
            service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._reflection:
            names = [service.name for service in self._services]
            reflection.enable_server_reflection(
                (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )
        # Before the port is bound: a server that never started keeps its port.
        metrics = serve_metrics(self._metrics_listen) if self._metrics_listen else None
        try:
            port = self._bind(server)
            await server.start()
        except BaseException:
            if metrics is not None:
                metrics.close()
            raise
        self._metrics = metrics
        self._server = server
        loop = asyncio.get_running_loop()
        self._untell = gauge(TASKS, lambda: {(): len(asyncio.all_tasks(loop))})
        return join(host, port)

    def set_serving(self, serving: bool) -> None:
        """Readiness of all services, as health tells it. Liveness is not touched."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` to end, cancels the rest. Idempotent."""
        self.set_serving(False)
        server, self._server = self._server, None
        metrics, self._metrics = self._metrics, None
        untell, self._untell = self._untell, lambda: None
        untell()
        try:
            if server is not None:
                await server.stop(grace_s)
        finally:
            if metrics is not None:
                await asyncio.to_thread(metrics.close)

    def _bind(self, server: grpc.aio.Server) -> int:
        try:
            return server.add_insecure_port(self._listen)
        except RuntimeError:
            raise PortInUse(f"cannot listen on {self._listen}", field=self._field) from None
