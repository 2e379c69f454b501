"""What the trace of one request tells: its stages, its attempts and its end; nothing of its text.

Its stages are spans that follow each other without a gap, so that they cover all of its time.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.observe.stages import Stage, StageClock, TraceContext
from baton.core.request.attempt import TokenLog
from baton.core.request.request import Accepted, ChatPrompt, Request
from baton.core.request.request_state import AttemptRun
from baton.router.request.dispatcher import Placement
from baton.rpc import trace_names as names
from baton.rpc.tracing import NO_SPAN, Kind, Span, Tracer, Value, error_type

_INT64 = 1 << 63
"""Larger numbers cannot travel in a span."""


class RequestTrace:
    """span: of the whole request. Every method returns at once."""

    __slots__ = ("_ended", "_operation", "_span", "_stage")

    def __init__(self, span: Span, operation: str = "") -> None:
        self._span = span
        self._operation = operation
        self._stage: Span = NO_SPAN
        self._ended = False

    @property
    def context(self) -> TraceContext:
        return self._span.context

    @property
    def stage_context(self) -> TraceContext:
        """Of the stage that it is in."""
        return self._stage.context

    def entered(self, stage: Stage, now: float) -> None:
        """From now on it is in another stage."""
        if not self._span.recording:
            return
        self._stage.end(at=now)
        self._stage = NO_SPAN
        if stage is not Stage.OVER:
            self._stage = self._span.child(stage.name.lower(), at=now)

    def accepted(self, accepted: Accepted) -> None:
        """It is known which model runs it, and on how much."""
        if not self._span.recording:
            return
        self._span.rename(f"{self._operation} {accepted.model}")
        told: dict[str, Value] = {
            names.RESPONSE_ID: accepted.request_id,
            names.RESPONSE_MODEL: accepted.model,
            names.INPUT_TOKENS: accepted.prompt_tokens,
        }
        if accepted.seed < _INT64:
            told[names.REQUEST_SEED] = accepted.seed
        self._span.tell(told)

    def attempt(self, run: AttemptRun, place: Placement) -> Span:
        """An attempt that is about to start on its workers. The caller ends it."""
        if not self._span.recording:
            return NO_SPAN
        attempt = run.attempt
        told: dict[str, Value] = {
            names.ATTEMPT_NUMBER: attempt.attempt,
            names.ATTEMPT_REASON: place.decision.reason,
            names.ATTEMPT_POSITION: attempt.position,
            names.ATTEMPT_TOKENS: len(attempt.token_ids),
            names.ATTEMPT_MOVED: run.moved,
        }
        if place.prefill is not None:
            told[names.PREFILL_WORKER] = place.prefill.identity.instance_id
        if place.decode is not None:
            told[names.DECODE_WORKER] = place.decode.identity.instance_id
        return self._span.child(names.ATTEMPT, told, kind=Kind.CLIENT)

    def part(self, name: str) -> RequestTrace:
        """Of what runs for it as a request of its own."""
        return RequestTrace(self._span.child(name)) if self._span.recording else self

    def ended(
        self,
        error: BaseException | None,
        stages: StageClock,
        logs: Sequence[TokenLog] = (),
        cached_tokens: int = 0,
    ) -> None:
        """It is over. stages: are over too. logs: of its choices. Only the first call counts."""
        if not self._span.recording or self._ended:
            return
        self._ended = True
        times = stages.times()
        told: dict[str, Value] = {
            names.ATTEMPTS: times.attempts,
            names.MOVES: times.moves,
            names.KV_BYTES: times.kv_bytes,
        }
        output_tokens = sum(map(len, logs))
        if output_tokens:
            told[names.OUTPUT_TOKENS] = output_tokens
            told[names.CACHED_TOKENS] = cached_tokens
            told[names.RESPONSE_FIRST_CHUNK_S] = times.first_token_s
            self._span.event(names.FIRST_TOKEN, at=stages.began + times.first_token_s)
        reasons = [log.finish_reason for log in logs]
        if None not in reasons and error is None:
            told[names.RESPONSE_FINISH_REASONS] = [str(r and r.name.lower()) for r in reasons]
        self._span.tell(told)
        self._span.end(error_type(error), at=stages.began + times.total_s)


NO_TRACE = RequestTrace(NO_SPAN)


def trace_of(tracer: Tracer, request: Request, began: float) -> RequestTrace:
    """The trace of a request that has arrived; began: when."""
    operation = names.CHAT if isinstance(request.prompt, ChatPrompt) else names.TEXT_COMPLETION
    span = tracer.begin(operation, parent=request.trace, at=began)
    if not span.recording:
        return NO_TRACE
    sampling = request.sampling
    told: dict[str, Value] = {
        names.OPERATION: operation,
        names.PROVIDER: names.BATON,
        names.REQUEST_CHOICES: request.n,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_TOP_K: sampling.top_k,
        names.TENANT: request.tenant.name,
    }
    if request.model:
        told[names.REQUEST_MODEL] = request.model
    if request.max_tokens is not None:
        told[names.REQUEST_MAX_TOKENS] = request.max_tokens
    span.tell(told)
    return RequestTrace(span, operation)
