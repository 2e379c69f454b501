"""Where a process is looked at: health and /metrics, each on a port of its own.

Both are opened before anything is loaded, so that whoever looks sees a process that starts, and not
one that is dead. Health here is plain text also where the process speaks TLS: probes show no
certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import NotFound, Overloaded
from baton.rpc import options
from baton.rpc.address import PortInUse, check, join, split
from baton.rpc.interceptors import ErrorInterceptor
from baton.rpc.metrics import serve_metrics
from baton.rpc.scrape import MetricsServer
from baton.rpc.startup import Startup
from baton.rpc.transport import bind

# grpc.health.v1 of one process, which is asked three things by name.
#
# - "" is liveness: SERVING as long as the event loop answers at all, also while a model loads.
# - "startup": SERVING once the process has finished starting, and from then on for good, whether or
#   not others that it needs are there.
# - A full service name is readiness: whether it takes work now.
#
# What is not SERVING comes with `baton-progress` among the answer's trailing metadata, in words for
# people. Until it is told which services there are,
# every name may be one of them, and is NOT_SERVING.

MAX_WATCHERS = 64
STARTUP = "startup"
PROGRESS = "baton-progress"

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves the status of all services of a process; they change together. startup: how far it
    has come; told when it is ready.
    """

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._services: frozenset[str] | None = None
        self._started = False
        self._serving = False
        self._leaving = False
        self._changed = asyncio.Event()
        self._watchers = 0

    def set_started(self, services: Iterable[str]) -> None:
        """All is loaded, and these are the services. They are not ready yet."""
        self._services = frozenset(services)
        self._started = True
        self._tell()

    def set_serving(self, serving: bool) -> None:
        """What the next Check and every Watch sees, at once; after `leave` always NOT_SERVING."""
        self._serving = serving and not self._leaving
        if self._serving:
            self._startup.ready()
        self._tell()

    def leave(self) -> None:
        """Not serving from now on, whatever is said later by somebody who does not know."""
        self._leaving = True
        self.set_serving(False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            raise NotFound("no such service here", field="service")
        if status != _Response.SERVING:
            words = "leaving" if self._leaving else self._startup.words
            context.set_trailing_metadata(((PROGRESS, words),))
        return _Response(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        names = ["", STARTUP, *sorted(self._services or ())]
        return health_pb2.HealthListResponse(
            statuses={name: _Response(status=self._status(name)) for name in names}
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded("too many health watchers")
        self._watchers += 1
        try:
            last = None
            while True:
                changed, status = self._changed, self._status(request.service)
                if status != last:
                    yield _Response(status=status)
                    last = status
                else:
                    await changed.wait()
        finally:
            self._watchers -= 1

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if not service:
            good = True
        elif service == STARTUP:
            good = self._started
        elif self._services is not None and service not in self._services:
            return int(_Response.SERVICE_UNKNOWN)
        else:
            good = self._serving
        return int(_Response.SERVING if good else _Response.NOT_SERVING)


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
