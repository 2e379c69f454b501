"""Asks every gRPC call for its key before anything of the call is read.

Everything but health needs a key: also reflection, and methods that do not exist.

A browser speaks HTTP/2 only over TLS, and some then send `te: trailers` by themselves, which is all
that gRPC asks of a call: its server takes one with any content type. So where no keys are asked
for, calls with an Origin are refused: browsers name the page in it for which they send something.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

import grpc

from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError, InvalidArgument, Unauthenticated
from baton.router.api.keys import Door, at_address
from baton.rpc.metrics import UNAUTHENTICATED, counter

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""What may be called without a key."""

_CALLER: ContextVar[Tenant] = ContextVar("caller")
"""Not set in calls of OPEN."""


def caller(context: grpc.aio.ServicerContext[Any, Any]) -> Tenant:
    """Who made the call that is being answered. LookupError in one of OPEN."""
    tenant = _CALLER.get()
    if tenant.name:
        return tenant
    # As "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000".
    host = unquote(context.peer()).partition(":")[2].rpartition(":")[0]
    return at_address(tenant, host.strip("[]"))


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Comes after the ErrorInterceptor, which words the refusals. web_pages: what browsers send
    for pages is answered, too."""

    def __init__(self, door: Door, *, web_pages: bool = False) -> None:
        self._door = door
        self._web_pages = web_pages

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method not in OPEN:
            metadata = handler_call_details.invocation_metadata or ()
            if not self._web_pages and any(name == "origin" for name, _ in metadata):
                return _refusal(
                    InvalidArgument(
                        "A router without keys answers no web page over gRPC.", field="origin"
                    )
                )
            shown = [
                value if isinstance(value, str) else ""
                for name, value in metadata
                if name == "authorization"
            ]
            try:
                _CALLER.set(self._door.admit(shown))
            except Unauthenticated as error:
                counter(UNAUTHENTICATED).labels("grpc").inc()
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for a method of whatever kind: this one waits for no message."""

    async def refuse(_: AsyncIterator[bytes], __: Any) -> None:
        raise error

    # The stubs describe the handlers of gRPC's other server, the one with threads.
    handler: Any = refuse
    return grpc.stream_stream_rpc_method_handler(handler)
