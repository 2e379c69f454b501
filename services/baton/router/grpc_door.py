"""Asks every gRPC call for its key before anything of the call is read; knows no service.

Everything but health needs a key: also reflection, and methods that do not exist.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from baton.core.errors import Unauthenticated
from baton.core.tenants import Tenant
from baton.router.keys import Door
from baton.rpc.metrics import UNAUTHENTICATED, counter

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""What may be called without a key."""

CALLER: ContextVar[Tenant] = ContextVar("caller")
"""Who made the call that is being answered. Not set in calls of OPEN."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Comes after the ErrorInterceptor, which words the refusals."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method not in OPEN:
            shown = [
                value if isinstance(value, str) else ""
                for name, value in handler_call_details.invocation_metadata or ()
                if name == "authorization"
            ]
            try:
                CALLER.set(self._door.admit(shown))
            except Unauthenticated as error:
                counter(UNAUTHENTICATED).labels("grpc").inc()
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for a method of whatever kind: this one waits for no message."""

    async def refuse(_: AsyncIterator[bytes], __: Any) -> None:
        raise error

    # The stubs describe the handlers of gRPC's other server, the one with threads.
    handler: Any = refuse
    return grpc.stream_stream_rpc_method_handler(handler)
