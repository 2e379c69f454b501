"""The ASGI application: every route of the HTTP API, and every failure as an OpenAI error body."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import BatonError, Internal, Unauthenticated
from baton.router.api.http.body import Bodies, ClientGone
from baton.router.api.http.chat import ChatAnswer
from baton.router.api.http.completions import CompletionAnswer
from baton.router.api.http.docs import document_routes
from baton.router.api.http.door import HttpDoor
from baton.router.api.http.errors import HttpError, described
from baton.router.api.http.frontend import Frontend
from baton.router.api.http.generation import Generation
from baton.router.api.http.models import health_routes, model_routes
from baton.router.api.http.parse import parse_chat, parse_completion
from baton.router.api.http.requests import request_routes
from baton.router.api.http.respond import send_json
from baton.router.api.http.tokenizing import tokenizing_apps
from baton.rpc.errors import forget_frames
from baton.rpc.logs import named

log = logging.getLogger(__name__)


class HttpApp:
    """Serves one Frontend. Exceptions that reach it come before any byte of a response."""

    def __init__(
        self,
        frontend: Frontend,
        registry: Collector,
        door: HttpDoor,
        pages: Sequence[BaseRoute] = (),
    ):
        self._door = door
        self._bodies = Bodies(frontend)
        chat = Generation(frontend, self._bodies, parse_chat, ChatAnswer)
        completions = Generation(frontend, self._bodies, parse_completion, CompletionAnswer)
        self._router = Router(
            [
                *_posts("/chat/completions", chat),
                *_posts("/completions", completions),
                *(
                    route
                    for path, app in tokenizing_apps(frontend, self._bodies).items()
                    for route in _posts(path, app)
                ),
                *model_routes(frontend),
                *request_routes(frontend),
                *document_routes(),
                *health_routes(frontend, registry),
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
                self._door.admit(scope)
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
