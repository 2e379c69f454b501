"""What is remembered of one attempt: where it ran, why there, what came of it.

Knows counts, times and names; no token, no text, and nothing of who reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.errors import BatonError, Reason
from baton.core.request.attempt_states import Phase
from baton.core.request.model import WorkerIdentity
from baton.core.routing.candidates import Candidate

BEST_OF_A_ROLE = 4
"""Candidates of a role that are remembered: the best ones, and some that could not take it."""

MAX_LOSSES = 4
MAX_TEXT = 300
"""Characters of one sentence."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Something went wrong on one of its phases. at_s: seconds since the request arrived."""

    phase: Phase
    reason: Reason
    message: str
    at_s: float


@dataclass(slots=True)
class AttemptRecord:
    """Seconds, where a name ends in _s; began_s and ended_s since the request arrived.

    position: output tokens that were accepted before. input_tokens: prompt and these. why: one
    sentence. candidates: the best few of each role, best first; others: how many more were looked
    at. predicted_first_token_s, local_s, remote_s: as in Decision.

    prefill_*: what the prefill worker told, once it answered. kv_s: from the attempt's start until
    decode had all its KV, kv_wait_s: what decode says that took since its blocks were reserved;
    kv_bytes: what was handed over. cached tokens: None while not told.
    """

    number: int
    position: int
    input_tokens: int
    choices: int
    moved: bool
    prefill: WorkerIdentity | None
    decode: WorkerIdentity | None
    why: str
    began_s: float
    candidates: tuple[Candidate, ...] = ()
    others: int = 0
    uncached_tokens: int = 0
    predicted_first_token_s: float | None = None
    local_s: float | None = None
    remote_s: float | None = None
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_cached_tokens: int | None = None
    decode_cached_tokens: int | None = None
    kv_bytes: int = 0
    kv_wait_s: float | None = None
    kv_s: float | None = None
    ended_s: float | None = None
    failed: bool = False
    """Whether it ended before all of its choices had, or left it."""
    losses: list[Loss] = field(default_factory=list)

    def lost(self, phase: Phase, error: BatonError, at_s: float) -> None:
        if len(self.losses) < MAX_LOSSES:
            self.losses.append(Loss(phase, error.reason, error.message[:MAX_TEXT], at_s))

    def ended(self, at_s: float, *, well: bool) -> None:
        """Only the first call counts."""
        if self.ended_s is None:
            self.ended_s, self.failed = at_s, not well


def best_few(candidates: Iterable[Candidate]) -> tuple[tuple[Candidate, ...], int]:
    """The candidates to remember, in their order, and how many others there were."""
    kept: list[Candidate] = []
    seen: dict[str, int] = {}
    others = 0
    for candidate in candidates:
        role = candidate.identity.role
        seen[role] = seen.get(role, 0) + 1
        if seen[role] <= BEST_OF_A_ROLE:
            kept.append(candidate._replace(detail=candidate.detail[:MAX_TEXT]))
        else:
            others += 1
    return tuple(kept), others
