"""Authenticates gRPC calls and determines their deadlines.

Every call is authenticated before its message is read, including calls of reflection and of unknown
methods; only health checks need no key.

A browser speaks HTTP/2 only over TLS, and some browsers then send `te: trailers` by themselves,
which is all that gRPC requires of a call: its server accepts any content type. So a router without
keys refuses calls with an Origin header, in which browsers name the calling page.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

import grpc

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, DeadlineExceeded, InvalidArgument, Unauthenticated
from batonlm.core.request.validation import REQUEST_RANGES
from batonlm.router.api.access import Authenticator, at_address
from batonlm.rpc.metrics import UNAUTHENTICATED, counter

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Methods that need no key."""

_CALLER: ContextVar[Tenant] = ContextVar("caller")
"""Not set in calls of OPEN."""


def caller(context: grpc.aio.ServicerContext[Any, Any]) -> Tenant:
    """Returns the caller of the current call. Raises LookupError in a method of OPEN."""
    tenant = _CALLER.get()
    if tenant.name:
        return tenant
    # The format is "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000".
    host = unquote(context.peer()).partition(":")[2].rpartition(":")[0]
    return at_address(tenant, host.strip("[]"))


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates every call. It comes after the ErrorInterceptor, which formats its errors."""

    def __init__(self, authenticator: Authenticator, *, web_pages: bool = False) -> None:
        """web_pages: accepts calls that browsers make for web pages."""
        self._authenticator = authenticator
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
                _CALLER.set(self._authenticator.authenticate(shown))
            except Unauthenticated as error:
                counter(UNAUTHENTICATED).labels("grpc").inc()
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that raises the error. It fits methods of any kind, because it reads no
    message."""

    async def refuse(_: AsyncIterator[bytes], __: Any) -> None:
        raise error

    # The type stubs describe the handlers of gRPC's synchronous server.
    handler: Any = refuse
    return grpc.stream_stream_rpc_method_handler(handler)


def deadline_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Returns the seconds left for the call, see `bounded_s`; None without a deadline. Raises
    DeadlineExceeded."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else bounded_s(remaining_s)


def bounded_s(remaining_s: float) -> float:
    """Returns the seconds that are left, at most what a request may set. Raises
    DeadlineExceeded."""
    if remaining_s <= 0:
        raise DeadlineExceeded("The request ran out of time.")
    return min(float(remaining_s), REQUEST_RANGES["deadline_s"].high)
