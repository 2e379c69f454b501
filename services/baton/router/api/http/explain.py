"""GET /requests/{id}: what this router remembers of one request, to whoever sent it, and of any
request to an operator, who alone sees where it ran and what was predicted.

With ?replay: what makes its tokens again; with ?replay=text also the grammar that it named.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import InvalidArgument, NotFound, Unavailable
from baton.core.observe.request_record import (
    AttemptRecord,
    Loss,
    Replay,
    RequestRecord,
    outline,
    unpacked,
)
from baton.core.request.model import WorkerIdentity
from baton.core.request.request import Grammar
from baton.core.routing.routing import Candidate
from baton.router.api.http.access import caller
from baton.router.api.http.answers import FINISH_REASONS, worker_words
from baton.router.api.http.responses import Json, encode
from baton.router.request.pipeline import Pipeline
from baton.rpc.tracing import now

# Words what makes a request's tokens again, as `replay_schema` says.


def replay_document(request_id: str, replay: Replay, *, with_text: bool) -> Json:
    """replay: of a request that is over. with_text: with what its client wrote, where that is
    needed."""
    sampling, stop = replay.sampling, replay.stop
    return {
        "object": "baton.replay",
        "version": 1,
        "request_id": request_id,
        "model": {"name": replay.model.name, "digest": replay.model.digest},
        "exact": replay.exact,
        "prompt_token_ids": unpacked(replay.prompt).tolist(),
        "n": replay.n,
        "sampling": {
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids,
        },
        "stop": {
            "max_tokens": stop.max_tokens,
            "min_tokens": stop.min_tokens,
            "stop_token_ids": stop.stop_token_ids,
            "ignore_eos": stop.ignore_eos,
        },
        "grammar": _grammar(replay.grammar, with_text=with_text),
        "outputs": [
            {"tokens": tokens, "sha256": digest}
            for tokens, digest in zip(replay.output_tokens, replay.digests, strict=True)
        ],
    }


def _grammar(grammar: Grammar | None, *, with_text: bool) -> Json | None:
    if grammar is None:
        return None
    return {
        "kind": grammar.kind.name.lower(),
        "digest": grammar.digest.hex(),
        "text": grammar.text if with_text else None,
    }


# Words what is remembered of one request, as `explain_schema` says.

_FOR_OPERATORS = "An operator's key shows more."


def explained(record: RequestRecord, now: float, *, whole: bool) -> Json:
    """now: a reading of the clock by which the request's stages are timed.

    whole: for an operator. Others see what became of their request, when and how long, and the
    short names of the workers that served it; not where these are, which others there are, and what
    was predicted, because a prediction tells what other tenants do.
    """
    times, clock = record.so_far(now), record.clock
    if not whole:
        times = times.without_addresses()
    has_text = bool(record.output_tokens) if clock is None else clock.has_told
    state = "failed" if record.failure is not None else "finished" if record.over else "running"
    return {
        "id": record.request_id,
        "object": "baton.request",
        "state": state,
        "stage": clock.stage.name.lower() if clock is not None else None,
        "arrived_at": round(record.arrived_at, 3),
        "asked": record.asked,
        "model": record.model,
        "priority": record.priority,
        "prompt_tokens": record.prompt_tokens,
        "max_tokens": record.max_tokens,
        "cached_tokens": record.cached_tokens if record.over else None,
        "choices": _choices(record) if record.over else None,
        "error": _error(record),
        "stages": {f"{stage}_s": _s(seconds) for stage, seconds in times.spent().items()},
        "first_token_s": _s(times.first_token_s) if has_text else None,
        "total_s": _s(times.total_s),
        "kv_bytes": times.kv_bytes,
        "moves": times.moves,
        "workers": [worker_words(worker) for worker in times.workers],
        "split": _split(record, whole=whole),
        "num_attempts": record.num_attempts,
        "attempts": [
            _attempt(attempt) if whole else _outline(attempt) for attempt in record.attempts
        ],
        "replayable": record.over and record.replay is not None,
    }


def _choices(record: RequestRecord) -> list[Json]:
    return [
        {
            "output_tokens": choice.output_tokens,
            "finish_reason": FINISH_REASONS[choice.finish_reason] if choice.finish_reason else None,
        }
        for choice in record.choices
    ]


def _error(record: RequestRecord) -> Json | None:
    failure = record.failure
    if failure is None:
        return None
    return {"code": failure.reason.name.lower(), "message": failure.message}


def _split(record: RequestRecord, *, whole: bool) -> Json:
    """Of a request that was prefilled apart in one attempt, that one's reason."""
    placed = [attempt for attempt in record.attempts if not attempt.moved]
    apart = [attempt for attempt in placed if attempt.prefill is not None]
    said = (apart or placed)[:1]
    return {
        "configured": record.split,
        "used": bool(apart),
        "why": (said[0].why if whole else outline(said[0])) if said else None,
    }


def _outline(attempt: AttemptRecord) -> Json:
    """An attempt as its tenant sees it."""
    own = replace(
        attempt,
        prefill=_placeless(attempt.prefill),
        decode=_placeless(attempt.decode),
        why=outline(attempt),
        predicted_first_token_s=None,
        local_s=None,
        remote_s=None,
        candidates=(),
        others=0,
        losses=[replace(loss, message=_FOR_OPERATORS) for loss in attempt.losses],
    )
    return _attempt(own)


def _placeless(worker: WorkerIdentity | None) -> WorkerIdentity | None:
    return None if worker is None else replace(worker, address="")


def _attempt(attempt: AttemptRecord) -> Json:
    state = "failed" if attempt.failed else "running" if attempt.ended_s is None else "ended"
    return {
        "number": attempt.number,
        "state": state,
        "began_s": _s(attempt.began_s),
        "ended_s": _maybe(attempt.ended_s),
        "moved": attempt.moved,
        "position": attempt.position,
        "input_tokens": attempt.input_tokens,
        "choices": attempt.choices,
        "prefill": worker_words(attempt.prefill) if attempt.prefill is not None else None,
        "decode": worker_words(attempt.decode) if attempt.decode is not None else None,
        "why": attempt.why,
        "uncached_tokens": attempt.uncached_tokens,
        "predicted_first_token_s": _maybe(attempt.predicted_first_token_s),
        "local_s": _maybe(attempt.local_s),
        "remote_s": _maybe(attempt.remote_s),
        "prefill_queue_s": _maybe(attempt.prefill_queue_s),
        "prefill_s": _maybe(attempt.prefill_s),
        "prefill_cached_tokens": attempt.prefill_cached_tokens,
        "decode_cached_tokens": attempt.decode_cached_tokens,
        "kv_bytes": attempt.kv_bytes,
        "kv_wait_s": _maybe(attempt.kv_wait_s),
        "kv_s": _maybe(attempt.kv_s),
        "candidates": [_candidate(candidate) for candidate in attempt.candidates],
        "others": attempt.others,
        "losses": [_loss(loss) for loss in attempt.losses],
    }


def _candidate(candidate: Candidate) -> Json:
    cost = candidate.cost
    return {
        "worker": worker_words(candidate.identity),
        "filter_reason": candidate.filter_reason.value,
        "detail": candidate.detail,
        "cost": None if cost is None else {name: _s(v) for name, v in cost._asdict().items()},
    }


def _loss(loss: Loss) -> Json:
    return {
        "phase": loss.phase.name.lower(),
        "code": loss.reason.name.lower(),
        "message": loss.message,
        "at_s": _s(loss.at_s),
    }


def _maybe(seconds: float | None) -> float | None:
    return None if seconds is None else _s(seconds)


def _s(seconds: float) -> float:
    """To microseconds."""
    return round(seconds, 6)


def request_routes(pipeline: Pipeline) -> list[Route]:
    async def explain(request: Request) -> Response:
        request_id = bare_id(request.path_params["id"])
        who = caller(request.scope)
        record = pipeline.explain(request_id, who)
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
