"""The ASGI application: all routes of the HTTP API, with every failure in the form of its API."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any, Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import (
    MOST_LETTERS,
    BatonError,
    Internal,
    Unauthenticated,
    model_not_found,
)
from batonlm.core.request.model import ModelDescription
from batonlm.router.api.http.access import HttpAccess, is_known
from batonlm.router.api.http.adapters import AdapterRoute, load_adapter, unload_adapter
from batonlm.router.api.http.answers import ChatAnswer, CompletionAnswer
from batonlm.router.api.http.anthropic import (
    ANTHROPIC,
    VERSION_HEADER,
    CountTokens,
    CountTokensBody,
    MessagesAnswer,
    model_document,
    models_document,
    parse_messages,
)
from batonlm.router.api.http.body import Bodies, ClientGone
from batonlm.router.api.http.connect import connect_routes, send_failure, speaks_connect
from batonlm.router.api.http.explain import explain_endpoint
from batonlm.router.api.http.generation import Generation, KeptStreamRoute
from batonlm.router.api.http.json_route import RefusedRoute
from batonlm.router.api.http.ollama import OLLAMA, PREFIX, ollama_routes
from batonlm.router.api.http.openai_responses import (
    RESPONSES,
    ResponsesAnswer,
)
from batonlm.router.api.http.openapi import openapi_document
from batonlm.router.api.http.parse import parse_chat, parse_completion
from batonlm.router.api.http.response_routes import (
    InputTokensRoute,
    ResponsesRoute,
    StoredResponseRoute,
)
from batonlm.router.api.http.responses import (
    OPENAI,
    HttpError,
    Json,
    WireFormat,
    encode,
    json_response,
    send_error,
)
from batonlm.router.api.http.schema import (
    DetokenizeBody,
    EmbedBody,
    LoadAdapterBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from batonlm.router.api.http.tokenizing import Detokenizing, Tokenizing
from batonlm.router.api.http.vectors import (
    VectorRoute,
    embed_inputs,
    rerank_inputs,
    score_inputs,
    write_embeddings,
    write_ranking,
    write_scores,
)
from batonlm.router.observe.metrics import TenantBlind
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.request.response_store import MemoryStore, ResponseStore
from batonlm.rpc.errors import forget_frames
from batonlm.rpc.logs import named

log = logging.getLogger(__name__)

_FILES = files("batonlm.router.api.http")
_NO_SNIFF = {"x-content-type-options": "nosniff"}
_CONFINED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_DOCS_HEADERS = {
    # The page loads the OpenAPI document from this router, and nothing from elsewhere.
    "content-security-policy": "default-src 'none'; connect-src 'self'; "
    f"script-src 'unsafe-inline'; style-src 'unsafe-inline'; {_CONFINED}",
    **_NO_SNIFF,
}
_PLAYGROUND_HEADERS = {
    # The browser runs only these scripts, which may call only this router. It refuses markup and
    # code that a script makes of text (trusted types), whoever wrote the text.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; require-trusted-types-for 'script'; "
    f"trusted-types 'none'; {_CONFINED}",
    **_NO_SNIFF,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # A newer router has other files.
    "cache-control": "no-cache",
}
MESSAGES = "/messages"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class OtherProcesses(Protocol):
    """What `batonlm.router.processes` answers for all processes of this router."""

    async def metrics(self) -> Collector:
        """Raises Unavailable."""
        ...

    async def find(self, request_id: str, tenant: Tenant, replay: str | None) -> Json | None:
        """Returns a record as `record_document` does, or None."""


@cache
def _document() -> bytes:
    """The OpenAPI document, the same for every app of a process; it takes 20 ms to write."""
    return encode(openapi_document())


class HttpApp:
    """Serves one Pipeline. Exceptions reach it only before the first byte of a response."""

    def __init__(
        self,
        pipeline: Pipeline,
        registry: Collector,
        access: HttpAccess,
        pages: Sequence[BaseRoute] = (),
        others: OtherProcesses | None = None,
        store: ResponseStore | None = None,
    ):
        """others: where this router consists of several processes. store: of responses; None: in
        memory."""
        self._access = access
        self._bodies = bodies = Bodies(pipeline)
        self._pipeline = pipeline
        self._registry = registry
        self._others = others
        self._created = int(time.time())
        responses = ResponsesRoute(
            pipeline,
            bodies,
            ResponsesAnswer,
            RESPONSES,
            store=MemoryStore() if store is None else store,
        )
        stored = StoredResponseRoute(responses)
        posts: dict[str, Any] = {
            "/responses": responses,
            "/responses/input_tokens": InputTokensRoute(responses),
            "/responses/compact": RefusedRoute(
                pipeline,
                bodies,
                "/responses/compact",
                "truncation: auto drops the beginning of what is too long for the model",
            ),
            "/responses/{id}/cancel": responses.cancel,
            "/chat/completions": Generation(pipeline, bodies, ChatAnswer, parse=parse_chat),
            "/completions": Generation(pipeline, bodies, CompletionAnswer, parse=parse_completion),
            MESSAGES: Generation(pipeline, bodies, MessagesAnswer, ANTHROPIC, parse=parse_messages),
            f"{MESSAGES}/count_tokens": CountTokens(pipeline, bodies, CountTokensBody),
            "/tokenize": Tokenizing(pipeline, bodies, TokenizeBody),
            "/detokenize": Detokenizing(pipeline, bodies, DetokenizeBody),
            "/embeddings": VectorRoute(pipeline, bodies, EmbedBody, embed_inputs, write_embeddings),
            "/rerank": VectorRoute(pipeline, bodies, RerankBody, rerank_inputs, write_ranking),
            "/score": VectorRoute(pipeline, bodies, ScoreBody, score_inputs, write_scores),
            "/load_lora_adapter": AdapterRoute(pipeline, bodies, LoadAdapterBody, load_adapter),
            "/unload_lora_adapter": AdapterRoute(
                pipeline, bodies, UnloadAdapterBody, unload_adapter
            ),
        }
        gets: dict[str, Any] = {
            "/responses/{id}/input_items": responses.list_items,
            "/models": self._list_models,
            # A path, because names such as "organisation/model" have slashes.
            "/models/{model:path}": self._show_model,
            "/requests/{id}": explain_endpoint(pipeline, others.find if others else None),
        }
        streams = KeptStreamRoute(pipeline)
        document = Response(_document(), media_type="application/json")
        docs = Response(
            (_FILES / "docs.html").read_bytes(), media_type="text/html", headers=_DOCS_HEADERS
        )
        self.routes: list[BaseRoute] = [
            # With and without the version, because clients use different base URLs.
            *(
                Route(prefix + path, app, methods=["POST"])
                for prefix in ("/v1", "")
                for path, app in posts.items()
            ),
            *(
                Route(prefix + path, get, methods=["GET"])
                for prefix in ("/v1", "")
                for path, get in gets.items()
            ),
            *(
                Route(f"{prefix}/streams/{{id}}", streams, methods=["GET", "DELETE"])
                for prefix in ("/v1", "")
            ),
            *(
                Route(f"{prefix}/responses/{{id}}", stored, methods=["GET", "DELETE"])
                for prefix in ("/v1", "")
            ),
            Route("/version", self._show_version),
            Route("/health", self._show_health),
            Route("/ping", self._show_health),
            Route("/metrics", self._show_metrics),
            _static("/openapi.json", document),
            _static("/docs", docs),
            *ollama_routes(pipeline, bodies, self._created),
            *connect_routes(pipeline, bodies),
            *pages,
        ]
        self._paths = [route.path for route in self.routes if isinstance(route, Route)]
        self._router = Router(self.routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # With "app" set, the router raises for an unknown route or method.
        scope["app"] = self
        try:
            try:
                self._access.check(scope)
            except (HttpError, Unauthenticated):
                await self._bodies.discard(scope, receive)
                raise
            try:
                await self._router(scope, receive, send)
            except HTTPException:
                # No route has read the body.
                await self._bodies.discard(scope, receive)
                raise
        except ClientGone:
            return
        except (BatonError, HttpError, HTTPException) as error:
            if isinstance(error, HTTPException):
                error = self._unrouted(error, scope)
            forget_frames(error)
            # The id of an admitted request, under which it can be explained.
            known = error.request_id if isinstance(error, BatonError) else ""
            await fail(scope, send, error, known or secrets.token_hex(16))
        except Exception:
            request_id = secrets.token_hex(16)
            about = named(request_id)
            log.exception("%s %s failed", scope["method"], scope["path"], extra=about)
            await fail(scope, send, Internal("internal error"), request_id)

    def _unrouted(self, error: HTTPException, scope: Scope) -> HttpError:
        """Returns the error for Starlette's, which its router raises."""
        path = scope["path"][:MOST_LETTERS]
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            return HttpError(
                405,
                f"{path} does not take {scope['method']}; it takes {allowed}",
                code="method_not_allowed",
                headers=[(b"allow", allowed.encode())],
            )
        near = get_close_matches(path, self._paths, n=1)
        hint = f"; the nearest is {near[0]}" if near else "; GET /docs lists all"
        return HttpError(404, f"there is no route {path}{hint}", code="not_found", headers=())

    async def _list_models(self, request: Request) -> Response:
        models = self._models()
        if wire_format(request.scope) is ANTHROPIC:
            return json_response(models_document(models))
        return json_response({"object": "list", "data": list(models.values())})

    async def _show_model(self, request: Request) -> Response:
        models = self._models()
        wanted = request.path_params["model"]
        if wanted not in models:
            raise model_not_found(wanted, models)
        model = models[wanted]
        is_anthropic = wire_format(request.scope) is ANTHROPIC
        return json_response(model_document(model) if is_anthropic else model)

    def _models(self) -> dict[str, Json]:
        """Returns the models by each of their names."""
        found = {
            model.name: self._model(model.name, model) for model in self._pipeline.all_models()
        }
        for model, adapter in self._pipeline.adapters():
            found[adapter.name] = self._model(adapter.name, model) | {"parent": model.name}
        aliased = self._pipeline.aliased().items()
        return found | {alias: self._model(alias, model) for alias, model in aliased}

    def _model(self, name: str, model: ModelDescription) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            # Not known while it sleeps.
            "max_model_len": model.max_model_len or None,
            "task": model.task.name.lower(),
        }

    async def _show_version(self, _: Request) -> Response:
        return json_response({"version": version("batonlm")})

    async def _show_health(self, _: Request) -> Response:
        """Returns 200 when a request sent now can be answered, otherwise 503; no body."""
        return Response(status_code=200 if self._pipeline.ready() else 503)

    async def _show_metrics(self, request: Request) -> Response:
        """Returns the metrics. A caller without a key, where metrics need none, does not see tenant
        names."""
        shown = self._registry if self._others is None else await self._others.metrics()
        if not is_known(request.scope):
            shown = TenantBlind(shown)
        headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, **_NO_SNIFF}
        return Response(generate_latest(shown), headers=headers)


async def fail(scope: Scope, send: Send, error: BatonError | HttpError, request_id: str) -> None:
    """Answers a request with a failure, in the form that its client expects."""
    if speaks_connect(scope):
        await send_failure(scope, send, error, request_id)
    else:
        await send_error(send, error, request_id, wire_format(scope))


def wire_format(scope: Scope) -> WireFormat:
    """Returns the form in which the client of a request expects failures, by its path and, on
    paths that two APIs have, by its headers."""
    path = scope["path"]
    if path.startswith(PREFIX):
        return OLLAMA
    if f"{path}/".removeprefix("/v1").startswith(f"{MESSAGES}/"):
        return ANTHROPIC
    return ANTHROPIC if any(name == VERSION_HEADER for name, _ in scope["headers"]) else OPENAI


CORS_MAX_AGE_S = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wraps the application so that browsers let pages of these origins call it. Cookies and other
    credentials of the browser are never allowed: a page shows a key in `authorization`."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        # A key, the content's type, and what the clients of OpenAI tell of themselves.
        allow_headers=("*",),
        expose_headers=("x-request-id", "request-id", "retry-after", "retry-after-ms"),
        max_age=CORS_MAX_AGE_S,
    )


def running_route() -> Route:
    """Returns GET / where no page is served there: by it Ollama's clients look for a server."""

    async def show(_: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    return Route("/", show)


def playground_routes() -> list[Route]:
    """Returns GET / and /playground/…: a static page with its scripts and styles, read once."""
    routes = []
    for folder in ("", "vendor/"):
        for entry in (_FILES / "page" / folder).iterdir():
            kind = _KINDS.get(entry.name.rpartition(".")[2])
            if entry.is_file() and kind is not None:
                name = folder + entry.name
                path = "/" if name == "index.html" else f"/playground/{name}"
                page = Response(entry.read_bytes(), headers=_PLAYGROUND_HEADERS, media_type=kind)
                routes.append(_static(path, page))
    return routes


def _static(path: str, response: Response) -> Route:
    async def show(_: Request) -> Response:
        return response

    return Route(path, show)
