"""Tells a request's StageClock what happens, with the time; knows nothing of why it happens."""

from __future__ import annotations

import time

from baton.core.stages import Stage, StageClock
from baton.router.decode_session import KvComplete
from baton.router.placement import Place
from baton.router.prefill_client import PrefillAnswer


class StageTimer(StageClock):
    """One per request."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_now())

    def reached(self, stage: Stage) -> None:
        """It is in this stage from now on."""
        self.enter(stage, _now())

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
        self.prefilled(answer.queue_s, answer.prefill_s, _now())

    def kv_complete(self, kv: KvComplete, *, computed: bool) -> None:
        """Decode has all KV of an attempt; computed: by itself."""
        self.decode_cached_tokens += kv.cached_tokens
        self.kv_bytes += kv.received_bytes
        if computed:
            self.computed_by_decode(kv.wait_s)
        self.reached(Stage.DECODE)

    def text_told(self) -> None:
        """The client gets its first text."""
        self.first_text(_now())


def _now() -> float:
    """Finer than an event loop's time, which may be a millisecond old."""
    return time.perf_counter()
