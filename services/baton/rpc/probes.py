"""Where a process is looked at: health and /metrics, each on a port of its own; knows no service.

Both are opened before anything is loaded, so that whoever looks sees a process that starts, and not
one that is dead. Health here is plain text also where the process speaks TLS: probes show no
certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from baton.rpc import options
from baton.rpc.address import PortInUse, check, join, split
from baton.rpc.health import Health
from baton.rpc.interceptors import ErrorInterceptor
from baton.rpc.metrics import serve_metrics
from baton.rpc.scrape import MetricsServer
from baton.rpc.startup import Startup
from baton.rpc.transport import bind


class Probes:
    """health: what is told, here and on the process's other gRPC ports. startup: how far the
    process's start has come, which both tell.
    """

    def __init__(self, *, health_listen: str = "", metrics_listen: str = "") -> None:
        """Empty: there is no such port."""
        self.startup = Startup()
        self.health = Health(self.startup)
        self.health_address = ""
        self._health_listen = health_listen
        self._metrics_listen = metrics_listen
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self._open = False
        self._unexport: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._metrics.address if self._metrics else ""

    async def open(self) -> None:
        """Idempotent. Raises PortInUse or InvalidArgument naming the option; nothing stays bound
        then.
        """
        if self._open:
            return
        self._open = True
        self._unexport = self.startup.export()
        try:
            if self._metrics_listen:
                self._metrics = serve_metrics(self._metrics_listen)
            if self._health_listen:
                self._server = await self._serve_health()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Idempotent."""
        self._open = False
        unexport, self._unexport = self._unexport, lambda: None
        unexport()
        server, self._server = self._server, None
        metrics, self._metrics = self._metrics, None
        try:
            if server is not None:
                await server.stop(0)
        finally:
            if metrics is not None:
                await asyncio.to_thread(metrics.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve_health(self) -> grpc.aio.Server:
        host, _ = split(self._health_listen, "health_listen")
        # Asked first, because gRPC does not say why a port cannot be had.
        check(self._health_listen, "health_listen")
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=options.public_server(options.PublicLimits())
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        try:
            self.health_address = join(host, bind(server, self._health_listen))
        except RuntimeError:
            message = f"cannot listen on {self._health_listen}"
            raise PortInUse(message, field="health_listen") from None
        await server.start()
        return server
