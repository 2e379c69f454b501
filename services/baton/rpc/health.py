"""grpc.health.v1 of one process: "" is liveness, a full service name is readiness.

Knows nothing of what makes a process ready. "" is SERVING as long as the event loop answers at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import NotFound, Overloaded

MAX_WATCHERS = 64

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves the status of the given service names; all change together."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(services)
        self._serving = False
        self._leaving = False
        self._changed = asyncio.Event()
        self._watchers = 0

    def set_serving(self, serving: bool) -> None:
        """What the next Check and every Watch sees, at once; after `leave` always NOT_SERVING."""
        self._serving = serving and not self._leaving
        self._changed.set()
        self._changed = asyncio.Event()

    def leave(self) -> None:
        """Not serving from now on, whatever is said later by somebody who does not know."""
        self._leaving = True
        self.set_serving(False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service and request.service not in self._services:
            raise NotFound("no such service here", field="service")
        return _Response(status=self._status(request.service))

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        names = ["", *sorted(self._services)]
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

    def _status(self, service: str) -> int:
        if not service:
            return int(_Response.SERVING)
        if service not in self._services:
            return int(_Response.SERVICE_UNKNOWN)
        return int(_Response.SERVING if self._serving else _Response.NOT_SERVING)
