"""Tells a request's StageClock and its trace what happens, with the time; knows nothing of why it
happens."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.stages import Stage, StageClock
from baton.core.token_log import TokenLog
from baton.router.decode_session import KvComplete
from baton.router.placement import Place
from baton.router.prefill_client import PrefillAnswer
from baton.router.request_trace import NO_TRACE, RequestTrace
from baton.rpc.tracing import now


class StageTimer(StageClock):
    """One per request. began: when it arrived. All readings are finer than an event loop's time,
    which may be a millisecond old."""

    __slots__ = ("trace",)

    def __init__(self, began: float, trace: RequestTrace = NO_TRACE) -> None:
        super().__init__(began)
        self.trace = trace
        trace.entered(Stage.TOKENIZE, began)

    def enter(self, stage: Stage, now: float) -> None:
        before = self._stage
        super().enter(stage, now)
        if self._stage is not before:
            self.trace.entered(stage, now)

    def reached(self, stage: Stage) -> None:
        """It is in this stage from now on."""
        self.enter(stage, now())

    def started(self, place: Place, *, moved: bool) -> None:
        """An attempt is given to its workers; moved: it goes on with KV that another one has."""
        self.attempts += 1
        self.moves += moved
        for worker in (place.prefill, place.decode):
            if worker is not None:
                self.served_by(worker.identity)
        self.reached(Stage.HAND_OVER if moved else Stage.PREFILL)

    def prefill_answered(self, answer: PrefillAnswer) -> None:
        self.prefill_cached_tokens += answer.cached_tokens
        self.prefilled(answer.queue_s, answer.prefill_s, now())

    def kv_complete(self, kv: KvComplete, *, computed: bool) -> None:
        """Decode has all KV of an attempt; computed: by itself."""
        self.decode_cached_tokens += kv.cached_tokens
        self.kv_bytes += kv.received_bytes
        if computed:
            self.computed_by_decode(kv.wait_s)
        self.reached(Stage.DECODE)

    def text_told(self) -> None:
        """The client gets its first text."""
        self.first_text(now())

    def over(
        self,
        error: BaseException | None,
        logs: Sequence[TokenLog] = (),
        cached_tokens: int = 0,
    ) -> None:
        """The request has ended, and its trace with it. logs: of its choices."""
        self.reached(Stage.OVER)
        self.trace.ended(error, self, logs, cached_tokens)
