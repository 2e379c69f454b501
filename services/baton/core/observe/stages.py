"""Where the time of a request goes, which workers serve it, and where in a trace it belongs.

A request is in one stage at a time, so that the stages add up to all of its time. Of a request that
is tried again, or has several choices, each stage is the sum of all its turns: the newest event
decides which stage it is in. Nothing here is called once per token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from baton.core.request.model import WorkerIdentity


class Stage(Enum):
    TOKENIZE = 1
    """It is let in, and its prompt is encoded."""
    TURN = 2
    """It waits for its turn and for workers."""
    PREFILL = 3
    """Its input is with a worker that has not answered."""
    HAND_OVER = 4
    """The first token is there, the KV not yet; or a sequence moves."""
    DECODE = 5
    DETOKENIZE = 6
    """All tokens are there, their text not yet."""
    OVER = 7


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where the time of one request went. Seconds, where a name ends in _s."""

    tokenize_s: float = 0.0
    turn_s: float = 0.0
    prefill_queue_s: float = 0.0
    """As prefill workers report it. Where decode prefilled, its queue counts as prefill."""
    prefill_s: float = 0.0
    """As the workers report it."""
    network_s: float = 0.0
    """The rest of the time until prefill had answered."""
    hand_over_s: float = 0.0
    decode_s: float = 0.0
    detokenize_s: float = 0.0
    first_token_s: float = 0.0
    """From arrival to the first text for the client."""
    total_s: float = 0.0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    """Input tokens whose KV decode had, so that they were not handed over."""
    kv_bytes: int = 0
    """That were handed over."""
    attempts: int = 0
    """How often choices were started on workers."""
    moves: int = 0
    """How many attempts went on with KV of another decode worker."""
    workers: tuple[WorkerIdentity, ...] = ()
    """In the order of their first use, each once."""

    def spent(self) -> dict[str, float]:
        """Seconds by stage, in the order in which a request passes them; they add up to total_s."""
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
        """For clients that are no operators: of its workers they see roles and names only."""
        return replace(self, workers=tuple(replace(each, address="") for each in self.workers))


class StageClock:
    """The stages of one request. All times are readings of one clock; began: when it arrived."""

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
        """The one it is in."""
        return self._stage

    @property
    def has_told(self) -> bool:
        """Whether the client got any text."""
        return self._first_text_at is not None

    def enter(self, stage: Stage, now: float) -> None:
        """From now on it is in this stage; once OVER, for good."""
        if self._stage not in (stage, Stage.OVER):
            self._spent[self._stage] += now - self._since
            self._stage, self._since = stage, now

    def served_by(self, worker: WorkerIdentity) -> None:
        self._workers[worker] = None

    def prefilled(self, queue_s: float, prefill_s: float, now: float) -> None:
        """A prefill worker has answered. Where decode was told sooner, it goes on with that."""
        self._queue_s += queue_s
        self._prefill_s += prefill_s
        if self._stage is Stage.PREFILL:
            self.enter(Stage.HAND_OVER, now)

    def computed_by_decode(self, seconds: float) -> None:
        """Decode has prefilled by itself, its queue included."""
        self._prefill_s += seconds

    def first_text(self, now: float) -> None:
        if self._first_text_at is None:
            self._first_text_at = now

    def times(self, now: float | None = None) -> StageTimes:
        """Of a request that is over; of one that still runs, until now."""
        spent, until = self._spent, self._since
        if now is not None and self._stage is not Stage.OVER:
            spent, until = dict(spent), max(now, until)
            spent[self._stage] += until - self._since
        there = spent[Stage.PREFILL]
        # Workers measure on clocks of their own: no more than the time that passed here.
        prefill_s = min(self._prefill_s, there)
        queue_s = min(self._queue_s, there - prefill_s)
        # Whoever reads late had text to read when it was over.
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
    """The two headers of W3C Trace Context. Both are empty where nothing is traced.

    They may be a stranger's: whoever goes on with a trace parses them first.
    """

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" where there is none. Fit for a log, whoever wrote the header."""
        found = _TRACEPARENT.fullmatch(self.traceparent)
        return found[1] if found else ""


UNTRACED = TraceContext()
