"""Tells a request's StageClock, its record and its trace what happens, with the time."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import BatonError
from baton.core.observe.request_record import AttemptRecord, RequestRecord, best_few, why
from baton.core.observe.stages import Stage, StageClock
from baton.core.request.attempt import Phase, TokenLog
from baton.core.request.request_state import AttemptRun
from baton.router.observe.request_trace import NO_TRACE, RequestTrace
from baton.router.request.dispatcher import Placement
from baton.router.workers.decode_session import KvComplete
from baton.router.workers.prefill_client import PrefillAnswer
from baton.rpc.tracing import now


class StageTimer(StageClock):
    """One per request. began: when it arrived. All readings are finer than an event loop's time,
    which may be a millisecond old. record: None while nobody wants to know."""

    __slots__ = ("record", "trace")

    def __init__(self, began: float, trace: RequestTrace = NO_TRACE) -> None:
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
        """It is in this stage from now on."""
        self.enter(stage, now())

    def started(self, run: AttemptRun, place: Placement) -> None:
        """An attempt is given to its workers."""
        self.attempts += 1
        self.moves += run.moved
        for worker in (place.prefill, place.decode):
            if worker is not None:
                self.served_by(worker.identity)
        if self.record is not None:
            self._remember(self.record, run, place)
        self.reached(Stage.HAND_OVER if run.moved else Stage.PREFILL)

    def prefill_answered(self, run: AttemptRun, answer: PrefillAnswer) -> None:
        self.prefill_cached_tokens += answer.cached_tokens
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.prefill_cached_tokens = answer.cached_tokens
            attempt.prefill_queue_s, attempt.prefill_s = answer.queue_s, answer.prefill_s
        self.prefilled(answer.queue_s, answer.prefill_s, now())

    def kv_complete(self, run: AttemptRun, kv: KvComplete, *, computed: bool) -> None:
        """Decode has all KV of an attempt; computed: by itself."""
        self.decode_cached_tokens += kv.cached_tokens
        self.kv_bytes += kv.received_bytes
        if computed:
            self.computed_by_decode(kv.wait_s)
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.decode_cached_tokens, attempt.kv_bytes = kv.cached_tokens, kv.received_bytes
            attempt.kv_wait_s, attempt.kv_s = kv.wait_s, self._age() - attempt.began_s
        self.reached(Stage.DECODE)

    def lost(self, run: AttemptRun, phase: Phase, error: BatonError) -> None:
        """Something went wrong on a phase of an attempt."""
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.lost(phase, error, self._age())

    def attempt_over(self, run: AttemptRun, *, well: bool) -> None:
        attempt = self._attempt(run)
        if attempt is not None:
            attempt.ended(self._age(), well=well)

    def text_told(self) -> None:
        """The client gets its first text."""
        self.first_text(now())

    def over(
        self,
        error: BaseException | None,
        logs: Sequence[TokenLog] = (),
        cached_tokens: int = 0,
    ) -> None:
        """The request has ended, its record and its trace with it. logs: of its choices."""
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
            )
        )
