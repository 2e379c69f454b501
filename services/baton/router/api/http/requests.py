"""GET /requests/{id}: what this router remembers of one request, to whoever sent it, and of any
request to an operator, who alone sees where it ran and what was predicted.

With ?replay: what makes its tokens again; with ?replay=text also the grammar that it named.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import InvalidArgument, NotFound, Unavailable
from baton.core.observe.replay import Replay
from baton.core.observe.request_record import RequestRecord
from baton.router.api.http.door import caller
from baton.router.api.http.explained import explained
from baton.router.api.http.frontend import Frontend
from baton.router.api.http.replayed import replay_document
from baton.router.api.http.respond import encode
from baton.rpc.tracing import now


def request_routes(frontend: Frontend) -> list[Route]:
    async def explain(request: Request) -> Response:
        request_id = bare_id(request.path_params["id"])
        who = caller(request.scope)
        record = frontend.explain(request_id, who)
        asked = request.query_params.get("replay")
        if asked is None:
            document = explained(record, now(), whole=who.operator)
        else:
            document = replay_document(request_id, _kept(record), with_text=_with_text(asked))
        return Response(encode(document), media_type="application/json")

    return [Route(f"{prefix}/requests/{{id}}", explain) for prefix in ("/v1", "")]


def _kept(record: RequestRecord) -> Replay:
    """Raises NotFound, or Unavailable while it runs."""
    if record.replay is None:
        raise NotFound("Nothing was kept to replay this request (keep_replays).", field="replay")
    if not record.over:
        raise Unavailable("The request still runs.", retry_after_s=1.0)
    if not record.output_tokens:
        raise NotFound("The request made no token that could be made again.", field="replay")
    return record.replay


def _with_text(asked: str) -> bool:
    """Raises InvalidArgument."""
    if asked not in ("", "ids", "text"):
        raise InvalidArgument("replay must be ids (as it is when empty) or text", field="replay")
    return asked == "text"


def bare_id(said: str) -> str:
    """Answers have ids with a kind in front, as chatcmpl-ID and cmpl-ID."""
    return said.rpartition("-")[2]
