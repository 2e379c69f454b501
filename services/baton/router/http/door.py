"""Asks every HTTP request for its key before it is routed; knows no route but the open ones."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Receive, Scope

from baton.core.errors import Unauthenticated
from baton.core.tenants import Tenant
from baton.router.http.body import discard_body
from baton.router.keys import Door
from baton.rpc import peer_token
from baton.rpc.metrics import UNAUTHENTICATED, counter

OPEN = frozenset({"/health", "/ping", "/docs", "/openapi.json"})
"""What says nothing but whether this router is ready, and what is the same everywhere."""
METRICS = "/metrics"
_TENANT = "baton.tenant"
_METHODS = ("GET", "HEAD")


class HttpDoor:
    """open_metrics: /metrics needs no key either. pages: paths that need none, because what is
    there is the same for everybody. token: whoever shows it in place of a key may read /metrics."""

    def __init__(
        self, door: Door, *, open_metrics: bool, pages: Collection[str] = (), token: str = ""
    ) -> None:
        self._door = door
        self._token = f"Bearer {token}" if token else ""
        self._open = OPEN | set(pages) | ({METRICS} if open_metrics else set())

    async def admit(self, scope: Scope, receive: Receive) -> None:
        """Notes who calls. Raises Unauthenticated, or ClientGone."""
        if scope["method"] in _METHODS and scope["path"] in self._open:
            return
        shown = [
            value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"
        ]
        reads_metrics = scope["path"] == METRICS and scope["method"] in _METHODS
        if reads_metrics and peer_token.matches(self._token, shown):
            return
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
