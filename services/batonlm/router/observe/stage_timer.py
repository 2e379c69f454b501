"""Passes the events of a request, with their times, to its StageClock, its record and its trace."""

from __future__ import annotations

from collections.abc import Sequence

from batonlm.core.errors import BatonError
from batonlm.core.observe.request_record import (
    AttemptRecord,
    PrefixRecord,
    RequestRecord,
    best_few,
    why,
)
from batonlm.core.observe.stages import Stage, StageClock, TraceContext
from batonlm.core.request.attempt import Phase, TokenLog
from batonlm.core.request.request import Accepted, ChatPrompt, Prompt, Request, VectorPrompt
from batonlm.core.request.request_state import AttemptRun
from batonlm.core.routing.routing import Decision
from batonlm.router.request.dispatcher import Placement
from batonlm.rpc import tracing
from batonlm.rpc.tracing import NO_SPAN, Kind, Span, Tracer, Value, error_type, now
from batonlm.v1.decode_pb2 import SequenceStarted
from batonlm.v1.prefill_pb2 import RunResponse

_INT64 = 1 << 63
"""Larger numbers do not fit a span attribute."""


class RequestTrace:
    """The trace of one request: its stages, its attempts and its end, without its text.

    Its stages are consecutive spans without gaps, so they cover all of its time. No method blocks.
    """

    __slots__ = ("_ended", "_operation", "_span", "_stage")

    def __init__(self, span: Span, operation: str = "") -> None:
        """span: of the whole request."""
        self._span = span
        self._operation = operation
        self._stage: Span = NO_SPAN
        self._ended = False

    @property
    def context(self) -> TraceContext:
        return self._span.context

    @property
    def stage_context(self) -> TraceContext:
        """The trace context of the current stage."""
        return self._stage.context

    def entered(self, stage: Stage, now: float) -> None:
        """The request enters another stage."""
        if not self._span.recording:
            return
        self._stage.end(at=now)
        self._stage = NO_SPAN
        if stage is not Stage.OVER:
            self._stage = self._span.child(stage.name.lower(), at=now)

    def accepted(self, accepted: Accepted) -> None:
        """The model and the prompt's length are known."""
        if not self._span.recording:
            return
        self._span.rename(f"{self._operation} {accepted.model}")
        attributes: dict[str, Value] = {
            tracing.RESPONSE_ID: accepted.request_id,
            tracing.RESPONSE_MODEL: accepted.model,
            tracing.INPUT_TOKENS: accepted.prompt_tokens,
        }
        if accepted.seed < _INT64:
            attributes[tracing.REQUEST_SEED] = accepted.seed
        self._span.set_attributes(attributes)

    def attempt(self, run: AttemptRun, place: Placement) -> Span:
        """Returns the span of an attempt that is about to start on its workers. The caller ends
        it."""
        if not self._span.recording:
            return NO_SPAN
        attempt = run.attempt
        attributes: dict[str, Value] = {
            tracing.ATTEMPT_NUMBER: attempt.attempt,
            tracing.ATTEMPT_REASON: place.decision.reason,
            tracing.ATTEMPT_POSITION: attempt.position,
            tracing.ATTEMPT_TOKENS: len(attempt.token_ids),
            tracing.ATTEMPT_MOVED: run.moved,
        }
        if place.prefill is not None:
            attributes[tracing.PREFILL_WORKER] = place.prefill.identity.instance_id
        if place.decode is not None:
            attributes[tracing.DECODE_WORKER] = place.decode.identity.instance_id
        return self._span.child(tracing.ATTEMPT, attributes, kind=Kind.CLIENT)

    def part(self, name: str) -> RequestTrace:
        """Returns the trace of a sub-request that runs on the request's behalf."""
        return RequestTrace(self._span.child(name)) if self._span.recording else self

    def ended(
        self,
        error: BaseException | None,
        stages: StageClock,
        logs: Sequence[TokenLog] = (),
        cached_tokens: int = 0,
    ) -> None:
        """The request and its stages are over. logs: of its choices. Only the first call counts."""
        if not self._span.recording or self._ended:
            return
        self._ended = True
        times = stages.times()
        attributes: dict[str, Value] = {
            tracing.ATTEMPTS: times.attempts,
            tracing.MOVES: times.moves,
            tracing.KV_BYTES: times.kv_bytes,
        }
        output_tokens = sum(map(len, logs))
        if output_tokens:
            attributes[tracing.OUTPUT_TOKENS] = output_tokens
            attributes[tracing.CACHED_TOKENS] = cached_tokens
            attributes[tracing.RESPONSE_FIRST_CHUNK_S] = times.first_token_s
            self._span.event(tracing.FIRST_TOKEN, at=stages.began + times.first_token_s)
        reasons = [log.finish_reason for log in logs]
        if None not in reasons and error is None:
            attributes[tracing.RESPONSE_FINISH_REASONS] = [
                str(r and r.name.lower()) for r in reasons
            ]
        self._span.set_attributes(attributes)
        self._span.end(error_type(error), at=stages.began + times.total_s)


NO_TRACE = RequestTrace(NO_SPAN)


def operation_of(prompt: Prompt) -> str:
    """Returns what a request does, as OpenTelemetry's conventions name it."""
    match prompt:
        case ChatPrompt():
            return tracing.CHAT
        case VectorPrompt():
            return tracing.RERANK if prompt.scores else tracing.EMBEDDINGS
        case _:
            return tracing.TEXT_COMPLETION


def trace_of(tracer: Tracer, request: Request, began: float) -> RequestTrace:
    """Returns the trace of a request that has arrived. began: when."""
    operation = operation_of(request.prompt)
    span = tracer.begin(operation, parent=request.trace, at=began)
    if not span.recording:
        return NO_TRACE
    sampling = request.sampling
    attributes: dict[str, Value] = {
        tracing.OPERATION: operation,
        tracing.PROVIDER: tracing.BATON,
        tracing.TENANT: request.tenant.name,
    }
    if not isinstance(request.prompt, VectorPrompt):
        attributes |= {
            tracing.REQUEST_CHOICES: request.n,
            tracing.REQUEST_TEMPERATURE: sampling.temperature,
            tracing.REQUEST_TOP_P: sampling.top_p,
            tracing.REQUEST_TOP_K: sampling.top_k,
        }
    if request.model:
        attributes[tracing.REQUEST_MODEL] = request.model
    if request.max_tokens is not None:
        attributes[tracing.REQUEST_MAX_TOKENS] = request.max_tokens
    span.set_attributes(attributes)
    return RequestTrace(span, operation)


class StageTimer(StageClock):
    """Times the stages of one request.

    Readings are finer than the event loop's time, which may be a millisecond old. record: None when
    no record is kept.
    """

    __slots__ = ("record", "trace")

    def __init__(self, began: float, trace: RequestTrace = NO_TRACE) -> None:
        """began: when the request arrived."""
        super().__init__(began)
        self.trace = trace
        self.record: RequestRecord | None = None
        trace.entered(Stage.TOKENIZE, began)

    def enter(self, stage: Stage, now: float) -> None:
        before = self._stage
        super().enter(stage, now)
        if self._stage is not before:
            self.trace.entered(stage, now)

    def reached(self, stage: Stage) -> None:
        """The request enters this stage."""
        self.enter(stage, now())

    def started(self, run: AttemptRun, place: Placement) -> None:
        """An attempt is given to its workers."""
        self.attempts += 1
        self.moves += run.moved and not run.returned
        for worker in (place.prefill, place.decode):
            if worker is not None:
                self.served_by(worker.identity)
        if self.record is not None:
            self._remember(self.record, run, place)
        self.reached(Stage.HAND_OVER if run.moved else Stage.PREFILL)

    def prefill_answered(self, run: AttemptRun, answer: RunResponse) -> None:
        queue_s, prefill_s = answer.queue_us / 1e6, answer.prefill_us / 1e6
        self.prefill_cached_tokens += answer.cached_tokens
        self.kv_bytes += answer.prefix.received_bytes
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.prefill_cached_tokens = answer.cached_tokens
            attempt.prefill_queue_s, attempt.prefill_s = queue_s, prefill_s
            _note_prefix(attempt, answer)
        self.prefilled(queue_s, prefill_s, now())

    def kv_complete(self, run: AttemptRun, started: SequenceStarted, *, computed: bool) -> None:
        """Decode has all KV of an attempt. computed: it prefilled by itself."""
        wait_s = started.wait_us / 1e6
        self.decode_cached_tokens += started.cached_tokens
        self.kv_bytes += started.received_bytes + started.prefix.received_bytes
        if computed:
            self.computed_by_decode(wait_s)
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.decode_cached_tokens = started.cached_tokens
            attempt.kv_bytes = started.received_bytes
            attempt.kv_wait_s, attempt.kv_s = wait_s, self._age() - attempt.began_s
            _note_prefix(attempt, started)
        self.reached(Stage.DECODE)

    def lost(self, run: AttemptRun, phase: Phase, error: BatonError) -> None:
        """A phase of an attempt failed."""
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.lost(phase, error, self._age())

    def attempt_over(self, run: AttemptRun, *, well: bool) -> None:
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.ended(self._age(), well=well)

    def first_text_ready(self) -> None:
        """The client gets its first text."""
        self.first_text(now())

    def over(
        self,
        error: BaseException | None,
        logs: Sequence[TokenLog] = (),
        cached_tokens: int = 0,
    ) -> None:
        """The request has ended; ends its record and its trace. logs: of its choices."""
        self.reached(Stage.OVER)
        if self.record is not None:
            self.record.ended(error, logs, cached_tokens)
        self.trace.ended(error, self, logs, cached_tokens)

    def _age(self) -> float:
        return now() - self.began

    def _attempt(self, run: AttemptRun) -> AttemptRecord | None:
        return None if self.record is None else self.record.attempt(run.attempt.attempt)

    def _remember(self, record: RequestRecord, run: AttemptRun, place: Placement) -> None:
        decision, attempt = place.decision, run.attempt
        candidates, others = best_few(decision.candidates)
        workers = [worker for worker in (place.prefill, place.decode) if worker is not None]
        record.served(exact=all(worker.description.exact for worker in workers))
        record.add(
            AttemptRecord(
                number=attempt.attempt,
                position=attempt.position,
                input_tokens=len(attempt.token_ids),
                choices=len(attempt.choices),
                moved=run.moved,
                prefill=place.prefill.identity if place.prefill is not None else None,
                decode=place.decode.identity if place.decode is not None else None,
                why=why(decision, record.policy, split=record.split, moved=run.moved),
                began_s=self._age(),
                candidates=candidates,
                others=others,
                uncached_tokens=decision.uncached_tokens,
                predicted_first_token_s=decision.first_token_s,
                local_s=decision.local_s,
                remote_s=decision.remote_s,
                prefix=_prefix(decision),
            )
        )


def _prefix(decision: Decision) -> PrefixRecord | None:
    plan = decision.plan
    if plan is None:
        return None
    return PrefixRecord(plan.sender, plan.num_tokens, decision.reason_to_collect)


def _note_prefix(attempt: AttemptRecord, answer: RunResponse | SequenceStarted) -> None:
    if answer.HasField("restored"):
        attempt.restored = dict(answer.restored.num_tokens)
        attempt.restore_s = answer.restored.wait_us / 1e6
    prefix = answer.prefix
    if answer.HasField("prefix") and attempt.prefix is not None:
        attempt.prefix.tokens, attempt.prefix.outcome = prefix.num_tokens, prefix.outcome
        attempt.prefix.collect_s = prefix.wait_us / 1e6
