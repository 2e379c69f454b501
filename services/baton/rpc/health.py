"""grpc.health.v1 of one process, which is asked three things by name.

- "" is liveness: SERVING as long as the event loop answers at all, also while a model loads.
- "startup": SERVING once the process has finished starting, and from then on for good, whether or
  not others that it needs are there.
- A full service name is readiness: whether it takes work now.

What is not SERVING comes with `baton-progress` among the answer's trailing metadata, in words for
people. Knows nothing of what makes a process ready. Until it is told which services there are,
every name may be one of them, and is NOT_SERVING.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import NotFound, Overloaded
from baton.rpc.startup import Startup

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
