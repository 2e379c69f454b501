"""GET /requests/{id}: the record of one request.

The sender of a request sees it, and an operator sees every request; only an operator sees where it
ran and what was predicted. With ?replay the answer has the inputs that reproduce its tokens, and
with ?replay=text also the grammar that the client gave.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import InvalidArgument, NotFound, Unavailable
from batonlm.core.observe.request_record import (
    AttemptRecord,
    Replay,
    RequestRecord,
    outline,
    unpacked,
)
from batonlm.core.request.model import WorkerIdentity
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.answer_schema import (
    Explained,
    ExplainedAttempt,
    ReplayFile,
    ReplaySampling,
    ReplayStop,
)
from batonlm.router.api.http.answers import FINISH_REASONS, serving_worker
from batonlm.router.api.http.responses import Json, json_response
from batonlm.router.request.pipeline import Pipeline
from batonlm.rpc.tracing import now

_FOR_OPERATORS = "An operator's key shows more."

Elsewhere = Callable[[str, Tenant, str | None], Awaitable[Json | None]]
"""Looks for a record at this router's other processes, as `record_document` does here: by request
id, tenant and ?replay. Returns None where none has it."""


def explain_endpoint(
    pipeline: Pipeline, elsewhere: Elsewhere | None
) -> Callable[[Request], Awaitable[Response]]:
    async def explain(request: Request) -> Response:
        # Answers have ids with a prefix, as chatcmpl-ID, cmpl-ID and msg_ID.
        request_id = request.path_params["id"].replace("_", "-").rpartition("-")[2]
        tenant = caller(request.scope)
        wanted = request.query_params.get("replay")
        if wanted not in (None, "", "ids", "text"):
            raise InvalidArgument(
                "replay must be ids (as it is when empty) or text", field="replay"
            )
        try:
            return json_response(record_document(pipeline, request_id, tenant, wanted))
        except NotFound as error:
            # A known request without a replay is in no other process.
            if elsewhere is None or error.field != "request_id":
                raise
            document = await elsewhere(request_id, tenant, wanted)
            if document is None:
                raise
            return json_response(document)

    return explain


def record_document(
    pipeline: Pipeline, request_id: str, tenant: Tenant, replay: str | None
) -> Json:
    """Returns the record of a request of this process, or what replays it. Raises NotFound, with
    the field request_id if it is none, and Unavailable."""
    record = pipeline.explain(request_id, tenant)
    if replay is None:
        return explained(record, now(), whole=tenant.operator)
    return _replay_file(record, with_text=replay == "text")


def explained(record: RequestRecord, now: float, *, whole: bool) -> Json:
    """Returns a document of type Explained.

    now: a reading of the clock that times the request's stages. whole: for an operator. Others see
    the outcome and timing of their request and the short names of the workers that served it. They
    do not see where these are, which others exist, and what was predicted, because predictions
    depend on other tenants' requests.
    """
    times, clock = record.so_far(now), record.clock
    has_text = bool(record.output_tokens) if clock is None else clock.has_text
    document = _copied(
        Explained,
        record,
        id=record.request_id,
        object="baton.request",
        state="failed" if record.failure else "finished" if record.over else "running",
        stage=clock.stage.name.lower() if clock is not None else None,
        arrived_at=round(record.arrived_at, 3),
        cached_tokens=record.cached_tokens if record.over else None,
        choices=_choices(record) if record.over else None,
        error=record.failure
        and {"code": record.failure.reason.name.lower(), "message": record.failure.message},
        stages={f"{stage}_s": seconds for stage, seconds in times.spent().items()},
        first_token_s=times.first_token_s if has_text else None,
        total_s=times.total_s,
        kv_bytes=times.kv_bytes,
        moves=times.moves,
        workers=[_worker(worker, whole=whole) for worker in times.workers],
        split=_split(record, whole=whole),
        attempts=[_attempt(attempt, whole=whole) for attempt in record.attempts],
        replayable=record.over and record.replay is not None,
    )
    rounded: Json = _rounded(document)
    return rounded


def _choices(record: RequestRecord) -> list[Json]:
    return [
        {
            "output_tokens": choice.output_tokens,
            "saved_steps": choice.saved_steps,
            "finish_reason": FINISH_REASONS[choice.finish_reason] if choice.finish_reason else None,
        }
        for choice in record.choices
    ]


def _split(record: RequestRecord, *, whole: bool) -> Json:
    """The reason is that of the first attempt with separate prefill, or of the first attempt."""
    placed = [attempt for attempt in record.attempts if not attempt.moved]
    apart = [attempt for attempt in placed if attempt.prefill is not None]
    reasons = [attempt.why if whole else outline(attempt) for attempt in (apart or placed)]
    return {
        "configured": record.split,
        "used": bool(apart),
        "why": reasons[0] if reasons else None,
    }


def _attempt(attempt: AttemptRecord, *, whole: bool) -> Json:
    document = _copied(
        ExplainedAttempt,
        attempt,
        state="failed" if attempt.failed else "running" if attempt.ended_s is None else "ended",
        prefill=attempt.prefill and _worker(attempt.prefill, whole=whole),
        decode=attempt.decode and _worker(attempt.decode, whole=whole),
        prefix=attempt.prefix
        and {
            "worker": _worker(attempt.prefix.sender, whole=whole),
            "planned_tokens": attempt.prefix.planned_tokens,
            "tokens": attempt.prefix.tokens,
            "outcome": attempt.prefix.outcome,
            "collect_s": attempt.prefix.collect_s,
            "reason": attempt.prefix.reason if whole else None,
        },
        candidates=[
            {
                "worker": _worker(candidate.identity, whole=whole),
                "filter_reason": candidate.filter_reason.value,
                "detail": candidate.detail,
                "cost": candidate.cost and candidate.cost._asdict(),
            }
            for candidate in attempt.candidates
        ],
        losses=[
            {
                "phase": loss.phase.name.lower(),
                "code": loss.reason.name.lower(),
                "message": loss.message if whole else _FOR_OPERATORS,
                "at_s": loss.at_s,
            }
            for loss in attempt.losses
        ],
    )
    if not whole:
        document |= dict.fromkeys(("predicted_first_token_s", "local_s", "remote_s"))
        document |= {"why": outline(attempt), "candidates": [], "others": 0}
    return document


def _worker(worker: WorkerIdentity, *, whole: bool) -> Json:
    return serving_worker(worker) | ({} if whole else {"address": ""})


def _replay_file(record: RequestRecord, *, with_text: bool) -> Json:
    """Returns a document of type ReplayFile. with_text: with what the client wrote, where it is
    needed.

    Raises NotFound, or Unavailable while the request runs.
    """
    replay = record.replay
    if replay is None:
        raise NotFound("Nothing was kept to replay this request (keep_replays).", field="replay")
    if not record.over:
        raise Unavailable("The request still runs.", retry_after_s=1.0)
    if not record.output_tokens:
        raise NotFound("The request made no token that could be made again.", field="replay")
    return _copied(
        ReplayFile,
        replay,
        object="baton.replay",
        version=1,
        request_id=record.request_id,
        model={"name": replay.model.name, "digest": replay.model.digest},
        prompt_token_ids=unpacked(replay.prompt).tolist(),
        sampling=_copied(ReplaySampling, replay.sampling),
        stop=_copied(ReplayStop, replay.stop),
        grammar=_grammar(replay, with_text=with_text),
        outputs=[
            {"tokens": tokens, "sha256": digest}
            for tokens, digest in zip(replay.output_tokens, replay.digests, strict=True)
        ],
    )


def _grammar(replay: Replay, *, with_text: bool) -> Json | None:
    grammar = replay.grammar
    if grammar is None:
        return None
    return {
        "kind": grammar.kind.name.lower(),
        "digest": grammar.digest.hex(),
        "text": grammar.text if with_text else None,
    }


def _copied(kind: type[msgspec.Struct], source: object, **changed: Any) -> Json:
    """Returns a document with the fields of `kind`, taken from `changed` or from attributes of
    source."""
    names = kind.__struct_fields__
    return {name: changed[name] if name in changed else getattr(source, name) for name in names}


def _rounded(value: Any) -> Any:
    """Returns the document with its seconds rounded to microseconds."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
