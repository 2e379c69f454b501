"""GET /requests/{id}: what this router remembers of one request, to whoever sent it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.router.http.door import caller
from baton.router.http.explained import explained
from baton.router.http.frontend import Frontend
from baton.router.http.respond import encode
from baton.rpc.tracing import now


def request_routes(frontend: Frontend) -> list[Route]:
    async def explain(request: Request) -> Response:
        request_id = bare_id(request.path_params["id"])
        record = frontend.explain(request_id, caller(request.scope))
        return Response(encode(explained(record, now())), media_type="application/json")

    return [Route(f"{prefix}/requests/{{id}}", explain) for prefix in ("/v1", "")]


def bare_id(said: str) -> str:
    """Answers have ids with a kind in front, as chatcmpl-ID and cmpl-ID."""
    return said.rpartition("-")[2]
