"""Asks every HTTP request for its key before it is routed; knows no route but the open ones."""

from __future__ import annotations

from starlette.types import Receive, Scope

from baton.core.errors import Unauthenticated
from baton.core.tenants import Tenant
from baton.router.http.body import discard_body
from baton.router.keys import Door
from baton.rpc.metrics import UNAUTHENTICATED, counter

OPEN = frozenset({"/health", "/ping"})
METRICS = "/metrics"
_TENANT = "baton.tenant"
_METHODS = ("GET", "HEAD")


class HttpDoor:
    """open_metrics: /metrics needs no key either."""

    def __init__(self, door: Door, *, open_metrics: bool) -> None:
        self._door = door
        self._open = OPEN | {METRICS} if open_metrics else OPEN

    async def admit(self, scope: Scope, receive: Receive) -> None:
        """Notes who calls. Raises Unauthenticated, or ClientGone."""
        if scope["method"] in _METHODS and scope["path"] in self._open:
            return
        shown = [
            value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"
        ]
        try:
            scope[_TENANT] = self._door.admit(shown)
        except Unauthenticated:
            counter(UNAUTHENTICATED).labels("http").inc()
            await discard_body(scope, receive)
            raise


def caller(scope: Scope) -> Tenant:
    """Who makes a request that was admitted. KeyError for one of an open route."""
    found: Tenant = scope[_TENANT]
    return found
