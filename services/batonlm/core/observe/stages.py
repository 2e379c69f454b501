"""The time of a request by stage, the workers that serve it, and its trace context.

A request is in one stage at a time, so the stages add up to its total time. When a request is
retried or has several choices, a stage is the sum of all its visits, and the newest event
determines the current stage. Nothing here is called once per token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from batonlm.core.request.model import WorkerIdentity


class Stage(Enum):
    TOKENIZE = 1
    """The request is admitted and its prompt is encoded."""
    TURN = 2
    """The request waits in the queue for workers."""
    PREFILL = 3
    """A worker has the input and has not answered."""
    HAND_OVER = 4
    """The first token has arrived, the KV not yet; or a sequence migrates."""
    DECODE = 5
    DETOKENIZE = 6
    """All tokens have arrived, their text not yet."""
    OVER = 7


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The time of one request by stage. Names that end in _s are seconds."""

    tokenize_s: float = 0.0
    turn_s: float = 0.0
    prefill_queue_s: float = 0.0
    """As prefill workers report it. When decode prefills, its queue counts as prefill."""
    prefill_s: float = 0.0
    """As the workers report it."""
    network_s: float = 0.0
    """The rest of the time until prefill answered."""
    hand_over_s: float = 0.0
    decode_s: float = 0.0
    detokenize_s: float = 0.0
    first_token_s: float = 0.0
    """From arrival to the first text for the client."""
    total_s: float = 0.0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    """Input tokens whose KV decode had cached, and which were not handed over."""
    kv_bytes: int = 0
    """Bytes that were handed over."""
    attempts: int = 0
    """Number of attempts that workers started."""
    moves: int = 0
    """Number of attempts that continued with KV of another decode worker."""
    workers: tuple[WorkerIdentity, ...] = ()
    """In the order of their first use, each once."""

    def spent(self) -> dict[str, float]:
        """Returns seconds by stage, in the order in which a request passes them. They add up to
        total_s."""
        return {
            "tokenize": self.tokenize_s,
            "turn": self.turn_s,
            "prefill_queue": self.prefill_queue_s,
            "prefill": self.prefill_s,
            "network": self.network_s,
            "hand_over": self.hand_over_s,
            "decode": self.decode_s,
            "detokenize": self.detokenize_s,
        }

    def without_addresses(self) -> StageTimes:
        """Returns a copy without worker addresses, for clients that are not operators."""
        return replace(self, workers=tuple(replace(each, address="") for each in self.workers))


class StageClock:
    """Measures the stages of one request. All times are readings of one clock, in seconds."""

    __slots__ = (
        "_began",
        "_first_text_at",
        "_prefill_s",
        "_queue_s",
        "_since",
        "_spent",
        "_stage",
        "_workers",
        "attempts",
        "decode_cached_tokens",
        "kv_bytes",
        "moves",
        "prefill_cached_tokens",
    )

    def __init__(self, began: float) -> None:
        """began: when the request arrived."""
        self.attempts = self.moves = 0
        self.prefill_cached_tokens = self.decode_cached_tokens = self.kv_bytes = 0
        self._began = self._since = began
        self._stage = Stage.TOKENIZE
        self._spent = dict.fromkeys(Stage, 0.0)
        self._queue_s = self._prefill_s = 0.0
        self._first_text_at: float | None = None
        self._workers: dict[WorkerIdentity, None] = {}

    @property
    def began(self) -> float:
        return self._began

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self._stage

    @property
    def has_text(self) -> bool:
        """Whether the client has received any text."""
        return self._first_text_at is not None

    def enter(self, stage: Stage, now: float) -> None:
        """Changes the current stage. OVER is final."""
        if self._stage not in (stage, Stage.OVER):
            self._spent[self._stage] += now - self._since
            self._stage, self._since = stage, now

    def served_by(self, worker: WorkerIdentity) -> None:
        self._workers[worker] = None

    def prefilled(self, queue_s: float, prefill_s: float, now: float) -> None:
        """A prefill worker has answered. Has no effect on the stage when decode is already
        further."""
        self._queue_s += queue_s
        self._prefill_s += prefill_s
        if self._stage is Stage.PREFILL:
            self.enter(Stage.HAND_OVER, now)

    def computed_by_decode(self, seconds: float) -> None:
        """Decode has prefilled by itself. seconds: includes its queue."""
        self._prefill_s += seconds

    def first_text(self, now: float) -> None:
        if self._first_text_at is None:
            self._first_text_at = now

    def times(self, now: float | None = None) -> StageTimes:
        """Returns the stage times: all of them when the request is over, else until now."""
        spent, until = self._spent, self._since
        if now is not None and self._stage is not Stage.OVER:
            spent, until = dict(spent), max(now, until)
            spent[self._stage] += until - self._since
        there = spent[Stage.PREFILL]
        # Workers use clocks of their own, so their times are capped by the time that passed here.
        prefill_s = min(self._prefill_s, there)
        queue_s = min(self._queue_s, there - prefill_s)
        # A client may read its first text only after the request is over; the text was there by
        # then.
        first = min(until, self._first_text_at or until)
        return StageTimes(
            tokenize_s=spent[Stage.TOKENIZE],
            turn_s=spent[Stage.TURN],
            prefill_queue_s=queue_s,
            prefill_s=prefill_s,
            network_s=there - prefill_s - queue_s,
            hand_over_s=spent[Stage.HAND_OVER],
            decode_s=spent[Stage.DECODE],
            detokenize_s=spent[Stage.DETOKENIZE],
            first_token_s=first - self._began,
            total_s=until - self._began,
            prefill_cached_tokens=self.prefill_cached_tokens,
            decode_cached_tokens=self.decode_cached_tokens,
            kv_bytes=self.kv_bytes,
            attempts=self.attempts,
            moves=self.moves,
            workers=tuple(self._workers),
        )


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class TraceContext(NamedTuple):
    """The two headers of W3C Trace Context. Both are empty when the request is not traced.

    The values may be untrusted: parse them before continuing the trace.
    """

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" without a trace. Safe to log, even when the header is untrusted."""
        found = _TRACEPARENT.fullmatch(self.traceparent)
        return found[1] if found else ""


UNTRACED = TraceContext()
