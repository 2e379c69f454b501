"""GET /v1/models and /v1/models/{id}: what is served, as OpenAI and vLLM list it."""

from __future__ import annotations

import time
from importlib.metadata import version

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import ModelNotFound
from baton.core.request.model import ModelDescription
from baton.router.api.http.door import is_known
from baton.router.api.http.frontend import Frontend
from baton.router.api.http.respond import Json, encode
from baton.router.observe.tenant_blind import TenantBlind

# GET /health, /ping, /version and /metrics, for probes and scrapers.


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


def model_routes(frontend: Frontend) -> list[Route]:
    started = int(time.time())

    async def list_models(_: Request) -> Response:
        listed = [_words(model, started) for model in frontend.models()]
        return _json({"object": "list", "data": listed})

    async def show_model(request: Request) -> Response:
        for model in frontend.models():
            if model.name == request.path_params["model"]:
                return _json(_words(model, started))
        raise ModelNotFound("there is no such model", field="model")

    return [
        route
        for prefix in ("/v1", "")
        for route in (
            Route(f"{prefix}/models", list_models),
            # A path: names such as "organisation/model" have slashes.
            Route(f"{prefix}/models/{{model:path}}", show_model),
        )
    ]


def _words(model: ModelDescription, created: int) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


def _json(document: Json) -> Response:
    return Response(encode(document), media_type="application/json")
