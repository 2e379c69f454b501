"""Checks the Host and the key of every HTTP request before it is routed."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Unauthenticated
from batonlm.router.api.access import Authenticator, at_address
from batonlm.router.api.http.responses import HttpError
from batonlm.rpc import peers
from batonlm.rpc.address import AllowedHosts
from batonlm.rpc.metrics import UNAUTHENTICATED, counter

READY = frozenset({"/health", "/ping"})
"""Paths that show only whether this router is ready. Load balancers use any Host for them."""
OPEN = READY | {"/docs", "/openapi.json"}
"""Paths that need no key: readiness, and documents that are the same on every router."""
METRICS = "/metrics"
_TENANT = "baton.tenant"
_METHODS = ("GET", "HEAD")

# Created per request: an exception that is raised again accumulates traceback frames.


def host_not_allowed() -> HttpError:
    return HttpError(
        421,
        "This router asks for no keys, so it answers only under names that it knows, and this "
        "request's Host is none of them: add it to the router's allowed_hosts (--allowed-hosts), "
        "or give the router keys.",
        code="host_not_allowed",
    )


def operator_key_required(why: str) -> HttpError:
    return HttpError(
        403,
        f"{why}: show an operator's key ('baton keys new --operator' makes one).",
        code="operator_key_required",
    )


class HttpAccess:
    """Decides whether a request may continue, and determines its caller."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        pages: Collection[str] = (),
        hosts: AllowedHosts | None = None,
        token: str = "",
    ) -> None:
        """pages: additional paths without a key. hosts: the host names that are answered; None:
        any, because requests need keys. token: of Baton's own processes, grants access to /metrics
        in place of a key."""
        self._authenticator = authenticator
        self._open = OPEN | set(pages)
        self._hosts = hosts
        self._token = f"Bearer {token}" if token else ""

    def check(self, scope: Scope) -> None:
        """Sets the caller. Raises HttpError or Unauthenticated."""
        path = scope["path"] if scope["method"] in _METHODS else ""
        if path in READY:
            return
        if self._hosts is not None and not self._hosts.allow(_values(scope, b"host")):
            raise host_not_allowed()
        if path in self._open:
            return
        tenant = self._tenant(scope, path)
        if tenant is not None:
            scope[_TENANT] = at_address(tenant, (scope.get("client") or ("",))[0])

    def _tenant(self, scope: Scope, path: str) -> Tenant | None:
        """Returns None for one of Baton's own processes that reads metrics. Raises HttpError or
        Unauthenticated."""
        shown = _credentials(scope)
        if path == METRICS and peers.token_matches(self._token, shown):
            return None
        try:
            tenant = self._authenticator.authenticate(shown)
        except Unauthenticated:
            counter(UNAUTHENTICATED).labels("http").inc()
            raise
        if path == METRICS and not tenant.sees_others:
            raise operator_key_required("Metrics tell of all tenants")
        return tenant


def caller(scope: Scope) -> Tenant:
    """Returns the caller of a request that passed `check`. Raises KeyError for a request that
    needed no key."""
    found: Tenant = scope[_TENANT]
    return found


def is_known(scope: Scope) -> bool:
    """Whether the request has a `caller`."""
    return _TENANT in scope


def _credentials(scope: Scope) -> list[str]:
    """Returns the values of `authorization`, and the key of each other `x-api-key` in that form."""
    shown = [value.decode("latin-1") for value in _values(scope, b"authorization")]
    keys = (value.decode("latin-1") for value in _values(scope, b"x-api-key"))
    return shown + [bearer for key in keys if (bearer := f"Bearer {key}") not in shown]


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]
