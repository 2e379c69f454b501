"""The answers of /requests/{id} as types, for the OpenAPI document and for commands that read them;
nothing is made of them here.

Times are seconds. Worker names are as in timings. Whoever shows no operator's key sees of a worker
no address, of an attempt no candidates and nothing predicted (null), and of a loss no message.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.router.api.http.answer_schema import FinishReasonWord, ServedBy


class ExplainedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """finish_reason: null for one that had not ended when the request did."""

    output_tokens: int
    finish_reason: FinishReasonWord | None


class ExplainedError(msgspec.Struct, forbid_unknown_fields=True):
    """code: the kind of failure, as in the label of baton_requests_total."""

    code: str
    message: str


class ExplainedSplit(msgspec.Struct, forbid_unknown_fields=True):
    """configured: this router has a prefill pool. used: one of its workers prefilled. why: one
    sentence; null before the request has workers."""

    configured: bool
    used: bool
    why: str | None


class ExplainedCandidate(msgspec.Struct, forbid_unknown_fields=True):
    """A worker that was looked at, and what became of it. cost: null where it could not take the
    attempt at all; its total is what is compared."""

    worker: ServedBy
    filter_reason: str
    detail: str
    cost: dict[str, float] | None


class ExplainedLoss(msgspec.Struct, forbid_unknown_fields=True):
    """phase: prefill or decode. at_s: since the request arrived."""

    phase: str
    code: str
    message: str
    at_s: float


class ExplainedAttempt(msgspec.Struct, forbid_unknown_fields=True):
    """began_s, ended_s: since the request arrived. position: output tokens accepted before it.
    moved: it went on with KV of another decode worker. state: failed where not all of its choices
    ended in it or left it. others: candidates that are not listed. local_s, remote_s: what was
    compared. kv_s: until decode had all KV, kv_wait_s: since decode reserved its blocks."""

    number: int
    state: Literal["running", "ended", "failed"]
    began_s: float
    ended_s: float | None
    moved: bool
    position: int
    input_tokens: int
    choices: int
    prefill: ServedBy | None
    decode: ServedBy | None
    why: str
    uncached_tokens: int
    predicted_first_token_s: float | None
    local_s: float | None
    remote_s: float | None
    prefill_queue_s: float | None
    prefill_s: float | None
    prefill_cached_tokens: int | None
    decode_cached_tokens: int | None
    kv_bytes: int
    kv_wait_s: float | None
    kv_s: float | None
    candidates: list[ExplainedCandidate]
    others: int
    losses: list[ExplainedLoss]


class Explained(msgspec.Struct, forbid_unknown_fields=True):
    """What one router remembers of one request. stage: of one that runs. cached_tokens, choices:
    once it is over. num_attempts: with those that are not listed."""

    id: str
    object: Literal["baton.request"]
    state: Literal["running", "finished", "failed"]
    stage: str | None
    arrived_at: float
    asked: Literal["chat", "text", "tokens"]
    model: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int | None
    choices: list[ExplainedChoice] | None
    error: ExplainedError | None
    stages: dict[str, float]
    first_token_s: float | None
    total_s: float
    kv_bytes: int
    moves: int
    workers: list[ServedBy]
    split: ExplainedSplit
    num_attempts: int
    attempts: list[ExplainedAttempt]
    replayable: bool
