"""The ASGI application: every route of the HTTP API, and every failure as an OpenAI error body."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import BatonError, Internal, ModelNotFound, Unauthenticated
from baton.core.request.model import ModelDescription
from baton.router.api.http.access import HttpAccess, is_known
from baton.router.api.http.answers import ChatAnswer, CompletionAnswer
from baton.router.api.http.body import Bodies, ClientGone
from baton.router.api.http.explain import request_routes
from baton.router.api.http.generation import Generation
from baton.router.api.http.openapi import openapi_document
from baton.router.api.http.parse import parse_chat, parse_completion
from baton.router.api.http.responses import HttpError, Json, described, encode, send_json
from baton.router.api.http.tokenizing import tokenizing_apps
from baton.router.observe.metrics import TenantBlind
from baton.router.request.pipeline import Pipeline
from baton.rpc.errors import forget_frames
from baton.rpc.logs import named

log = logging.getLogger(__name__)


class HttpApp:
    """Serves one Pipeline. Exceptions that reach it come before any byte of a response."""

    def __init__(
        self,
        pipeline: Pipeline,
        registry: Collector,
        access: HttpAccess,
        pages: Sequence[BaseRoute] = (),
    ):
        self._access = access
        self._bodies = Bodies(pipeline)
        chat = Generation(pipeline, self._bodies, parse_chat, ChatAnswer)
        completions = Generation(pipeline, self._bodies, parse_completion, CompletionAnswer)
        self._router = Router(
            [
                *_posts("/chat/completions", chat),
                *_posts("/completions", completions),
                *(
                    route
                    for path, app in tokenizing_apps(pipeline, self._bodies).items()
                    for route in _posts(path, app)
                ),
                *model_routes(pipeline),
                *request_routes(pipeline),
                *document_routes(),
                *health_routes(pipeline, registry),
                *pages,
            ],
            redirect_slashes=False,
        )

    @property
    def routes(self) -> list[BaseRoute]:
        return self._router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # With "app" set, the router raises for an unknown route or method.
        scope["app"] = self
        try:
            try:
                self._access.check(scope)
            except (HttpError, Unauthenticated):
                await self._bodies.discard(scope, receive)
                raise
            await self._router(scope, receive, send)
        except ClientGone:
            return
        except (BatonError, HttpError, HTTPException) as error:
            forget_frames(error)
            await _refuse(error, send)
        except Exception:
            request_id = secrets.token_hex(16)
            about = named(request_id)
            log.exception("%s %s failed", scope["method"], scope["path"], extra=about)
            await _refuse(Internal("internal error"), send, request_id)


def _posts(path: str, app: ASGIApp) -> list[Route]:
    """With and without the version: clients differ in what they take for the base of all paths."""
    return [Route(prefix + path, app, methods=["POST"]) for prefix in ("/v1", "")]


async def _refuse(
    error: BatonError | HttpError | HTTPException, send: Send, request_id: str = ""
) -> None:
    status, body, headers = described(error)
    # That of a request which was let in, by which it can be explained.
    known = error.request_id if isinstance(error, BatonError) else ""
    request_id = known or request_id or secrets.token_hex(16)
    await send_json(send, status, body, [(b"x-request-id", request_id.encode()), *headers])


# GET /health, /ping, /version and /metrics, for probes and scrapers.


def health_routes(pipeline: Pipeline, registry: Collector) -> list[Route]:
    blind = TenantBlind(registry)

    async def health(_: Request) -> Response:
        """200 when a request sent now can be answered, else 503; no body."""
        return Response(status_code=200 if pipeline.ready() else 503)

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


def model_routes(pipeline: Pipeline) -> list[Route]:
    started = int(time.time())

    async def list_models(_: Request) -> Response:
        listed = [_words(model, started) for model in pipeline.models()]
        return _json({"object": "list", "data": listed})

    async def show_model(request: Request) -> Response:
        for model in pipeline.models():
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


_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page fetches the document from here, and nothing from anywhere else."""


def document_routes() -> list[Route]:
    document = encode(openapi_document())
    page = files("baton.router.api.http").joinpath("docs.html").read_bytes()

    async def show_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def show_page(_: Request) -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    return [Route("/openapi.json", show_document), Route("/docs", show_page)]


_FOLDER = "page"
_INDEX = "index.html"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # A router that was replaced by a newer one has other files.
    "cache-control": "no-cache",
}


def playground_routes() -> list[Route]:
    """Reads the files once."""
    folder = files("baton.router.api.http") / _FOLDER
    found = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    pages = {"/" if name == _INDEX else f"/playground/{name}": name for name in sorted(found)}

    def route(path: str, name: str) -> Route:
        kind = _KINDS[name.rpartition(".")[2]]

        async def show(_: Request) -> Response:
            return Response(found[name], headers=_HEADERS, media_type=kind)

        return Route(path, show)

    return [route(path, name) for path, name in pages.items()]
