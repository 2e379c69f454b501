"""GET /v1/models and /v1/models/{id}: what is served, as OpenAI and vLLM list it."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import ModelNotFound
from baton.core.request.model import ModelDescription
from baton.router.api.http.frontend import Frontend
from baton.router.api.http.respond import Json, encode


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
