"""Decides of every HTTP request whether it may go on, before it is routed: by the name under which
it came, and by its key.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from baton.core.admission.tenants import Tenant
from baton.core.errors import Unauthenticated
from baton.router.api.access import Authenticator, at_address
from baton.router.api.http.responses import HttpError
from baton.rpc import peer_token
from baton.rpc.hosts import AllowedHosts
from baton.rpc.metrics import UNAUTHENTICATED, counter

READY = frozenset({"/health", "/ping"})
"""What says nothing but whether this router is ready. Load balancers ask by any name."""
OPEN = READY | {"/docs", "/openapi.json"}
"""And what is the same everywhere."""
METRICS = "/metrics"
_TENANT = "baton.tenant"
_METHODS = ("GET", "HEAD")


class HttpAccess:
    """open_metrics: /metrics needs no key either. pages: paths that need none, because what is
    there is the same for everybody. hosts: under which names requests are answered at all; None:
    under any, as they have to show keys. token: whoever shows it in place of a key may read
    /metrics."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        open_metrics: bool,
        pages: Collection[str] = (),
        hosts: AllowedHosts | None = None,
        token: str = "",
    ) -> None:
        self._authenticator = authenticator
        self._open_metrics = open_metrics
        self._open = OPEN | set(pages)
        self._hosts = hosts
        self._token = f"Bearer {token}" if token else ""

    def check(self, scope: Scope) -> None:
        """Notes who calls. Raises HttpError or Unauthenticated."""
        path = scope["path"] if scope["method"] in _METHODS else ""
        if path in READY:
            return
        self._check_host(scope)
        if path in self._open:
            return
        tenant = self._tenant(scope, path)
        if tenant is not None:
            scope[_TENANT] = at_address(tenant, (scope.get("client") or ("",))[0])

    def _check_host(self, scope: Scope) -> None:
        """Raises HttpError."""
        if self._hosts is not None and not self._hosts.allow(_values(scope, b"host")):
            raise HttpError(
                421,
                "This router asks for no keys, so it answers only under names that it knows, and "
                "this request's Host is none of them: add it to the router's allowed_hosts "
                "(--allowed-hosts), or give the router keys.",
                code="host_not_allowed",
            )

    def _tenant(self, scope: Scope, path: str) -> Tenant | None:
        """None: whoever reads open metrics without an operator's key. Raises HttpError or
        Unauthenticated."""
        shown = [value.decode("latin-1") for value in _values(scope, b"authorization")]
        open_metrics = path == METRICS and (
            self._open_metrics or peer_token.matches(self._token, shown)
        )
        try:
            tenant = self._authenticator.authenticate(shown)
        except Unauthenticated:
            if open_metrics:
                return None
            counter(UNAUTHENTICATED).labels("http").inc()
            raise
        if path != METRICS or tenant.sees_others:
            return tenant
        if open_metrics:
            return None
        raise HttpError(
            403,
            "Metrics tell of all tenants: show an operator's key ('baton keys new --operator' "
            "makes one).",
            code="operator_key_required",
        )


def caller(scope: Scope) -> Tenant:
    """Who makes a request that was admitted. KeyError for one that needed no key."""
    found: Tenant = scope[_TENANT]
    return found


def is_known(scope: Scope) -> bool:
    """Whether there is a `caller`."""
    return _TENANT in scope


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]
