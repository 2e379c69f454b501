"""GET /health, /ping, /version and /metrics, for probes and scrapers."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.router.api.http.door import is_known
from baton.router.api.http.frontend import Frontend
from baton.router.api.http.respond import encode
from baton.router.observe.tenant_blind import TenantBlind


def health_routes(frontend: Frontend, registry: Collector) -> list[Route]:
    blind = TenantBlind(registry)

    async def health(_: Request) -> Response:
        """200 when a request sent now can be answered, else 503; no body."""
        return Response(status_code=200 if frontend.ready() else 503)

    async def show_version(_: Request) -> Response:
        return Response(encode({"version": version("baton")}), media_type="application/json")

    async def metrics(request: Request) -> Response:
        """Where they are open to whoever asks, without tenants' names."""
        shown = registry if is_known(request.scope) else blind
        return Response(
            generate_latest(shown),
            headers={
                "content-type": CONTENT_TYPE_PLAIN_0_0_4,
                "x-content-type-options": "nosniff",
            },
        )

    return [
        Route("/health", health),
        Route("/ping", health),
        Route("/version", show_version),
        Route("/metrics", metrics),
    ]
