"""What is remembered of one request while it runs and for a while afterwards.

That is where its attempts ran and why there, what came of them, and what makes its tokens again.

Counts, times, decisions and names only. The token ids of the prompt are kept where replays are kept
(`RequestRecord.replay`), the text never.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from baton.core.errors import BatonError, Reason
from baton.core.observe.stages import StageClock, StageTimes
from baton.core.request.attempt import Phase, TokenLog
from baton.core.request.model import ModelDescription, WorkerIdentity
from baton.core.request.request import FinishReason, Grammar, SamplingParams, StopParams
from baton.core.routing.routing import (
    ALONE,
    CHEAPER,
    NO_PREFILL,
    SHORT,
    Candidate,
    Decision,
    FilterReason,
    RoutingPolicy,
)


def packed(token_ids: Sequence[int]) -> bytes:
    """As they travel: little-endian int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(ids: bytes) -> array[int]:
    """What `packed` made, as numbers."""
    found = array("i", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def digest(token_ids: Sequence[int]) -> str:
    """Names tokens without telling them: hex, of sha256 over their packed form."""
    return sha256(packed(token_ids)).hexdigest()


@dataclass(frozen=True, slots=True)
class Replay:
    """prompt: packed ids. sampling: with the seed in use. exact: every worker that served it ran in
    exact mode. digests, output_tokens: one a choice, once it is over."""

    model: ModelDescription
    prompt: bytes
    n: int
    sampling: SamplingParams
    stop: StopParams
    grammar: Grammar | None = None
    exact: bool = True
    digests: tuple[str, ...] = ()
    output_tokens: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        grammar = len(self.grammar.text) if self.grammar is not None else 0
        lists = len(self.sampling.logit_bias) * 2 + len(self.sampling.allowed_token_ids)
        return len(self.prompt) + grammar + 32 * lists + 160 * self.n

    def ended(self, outputs: Sequence[Sequence[int]]) -> Replay:
        """outputs: one a choice."""
        return replace(
            self,
            digests=tuple(digest(ids) for ids in outputs),
            output_tokens=tuple(len(ids) for ids in outputs),
        )


BEST_OF_A_ROLE = 4
"""Candidates of a role that are remembered: the best ones, and some that could not take it."""

MAX_LOSSES = 4
MAX_TEXT = 300
"""Characters of one sentence."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A failure on one phase of an attempt."""

    phase: Phase
    reason: Reason
    message: str
    at_s: float
    """Seconds since the request arrived."""


@dataclass(slots=True)
class AttemptRecord:
    """Where one attempt ran, why there, and what came of it. Seconds, where a name ends in _s."""

    number: int
    position: int
    """Output tokens that were accepted before."""
    input_tokens: int
    """Tokens of the prompt and these."""
    choices: int
    moved: bool
    prefill: WorkerIdentity | None
    decode: WorkerIdentity | None
    why: str
    """One sentence."""
    began_s: float
    """Since the request arrived."""
    candidates: tuple[Candidate, ...] = ()
    """The best few of each role, best first."""
    others: int = 0
    """How many more candidates there were."""
    uncached_tokens: int = 0
    predicted_first_token_s: float | None = None
    local_s: float | None = None
    remote_s: float | None = None
    """These four as in Decision."""
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_cached_tokens: int | None = None
    """These three as the prefill worker reports them; None until then."""
    decode_cached_tokens: int | None = None
    kv_bytes: int = 0
    """That were handed over."""
    kv_wait_s: float | None = None
    """From the reservation of decode's blocks until it had all KV, as decode reports it."""
    kv_s: float | None = None
    """From the attempt's start until decode had all KV."""
    ended_s: float | None = None
    """Since the request arrived."""
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


MAX_ATTEMPTS = 16
"""That are remembered: the first half of them and the newest ones."""

BASE_BYTES = 3000
ATTEMPT_BYTES = 6000
"""What a record and each of its attempts take at most, by and large: texts are cut."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How one choice ended. finish_reason: None for one that had not when the request did."""

    output_tokens: int
    finish_reason: FinishReason | None
    stop_string: bool = False
    """Whether a stop string ended it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. message: as its client was told."""

    reason: Reason
    message: str


@dataclass(slots=True)
class RequestRecord:
    """What is remembered of one request."""

    request_id: str
    tenant: str
    arrived_at: float
    """Seconds since 1970."""
    asked: str
    """One of "chat", "text" and "tokens"."""
    priority: int
    policy: RoutingPolicy
    """By which its workers are chosen."""
    split: bool
    """Whether a prefill pool is configured."""
    clock: StageClock | None
    """None once it is over."""
    model: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    cached_tokens: int = 0
    attempts: list[AttemptRecord] = field(default_factory=list)
    """Those that are remembered."""
    num_attempts: int = 0
    """All of them."""
    choices: tuple[ChoiceEnd, ...] = ()
    """Once it is over."""
    failure: Failure | None = None
    times: StageTimes | None = None
    """Once it is over; before, see `so_far`."""
    replay: Replay | None = None

    @property
    def over(self) -> bool:
        return self.times is not None

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def size(self) -> int:
        """Bytes that it takes, by and large; more than that it does not."""
        replay = self.replay.size if self.replay is not None else 0
        return BASE_BYTES + ATTEMPT_BYTES * len(self.attempts) + 64 * len(self.choices) + replay

    def attempt(self, number: int) -> AttemptRecord | None:
        """The attempt of that number, or None when it is not remembered."""
        return next((each for each in reversed(self.attempts) if each.number == number), None)

    def add(self, attempt: AttemptRecord) -> None:
        self.num_attempts += 1
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            del self.attempts[MAX_ATTEMPTS // 2]

    def accepted(self, model: str, prompt_tokens: int, stop: StopParams) -> None:
        """It is known what is to run."""
        self.model, self.prompt_tokens = model, prompt_tokens
        self.max_tokens = stop.max_tokens

    def runs_on(self, model: ModelDescription) -> None:
        """While nothing of it has run, another model of the same name may take its place."""
        self.model = model.name
        if self.replay is not None:
            self.replay = replace(self.replay, model=model)

    def served(self, *, exact: bool) -> None:
        """Workers take it on; exact: all of them run in exact mode."""
        if self.replay is not None and not exact:
            self.replay = replace(self.replay, exact=False)

    def so_far(self, now: float) -> StageTimes:
        """now: a reading of the clock by which its stages are timed."""
        if self.times is not None:
            return self.times
        return self.clock.times(now) if self.clock is not None else StageTimes()

    def ended(
        self, error: BaseException | None, logs: Sequence[TokenLog], cached_tokens: int
    ) -> None:
        """It is over, its stages are too. error: None for one that ended well; whatever is no
        BatonError is its client's leaving. Nothing of the logs is kept but numbers and digests."""
        if self.over or self.clock is None:
            return
        self.times, self.clock = self.clock.times(), None
        self.cached_tokens = cached_tokens
        self.choices = tuple(
            ChoiceEnd(len(log), log.finish_reason, log.stop_string is not None) for log in logs
        )
        if isinstance(error, BatonError):
            self.failure = Failure(error.reason, error.message[:MAX_TEXT])
        elif error is not None:
            self.failure = Failure(Reason.CANCELLED, "The client left.")
        if self.replay is not None:
            self.replay = self.replay.ended([log.token_ids() for log in logs])


MAX_DETAIL = 200
"""Characters that are told of what one worker's fate adds."""

_MOVED = "Its KV came from another decode worker: nothing was prefilled."
_ALONE = "Every choice ends at its first token, which prefill makes: no decode is needed."
_LOCAL = "Prefilled on decode"
_APART = "Prefill and decode ran apart"


def outline(attempt: AttemptRecord) -> str:
    """The same without what was known of workers, for those who may not see it."""
    if attempt.moved:
        return _MOVED
    if attempt.decode is None:
        return _ALONE
    return f"{_LOCAL if attempt.prefill is None else _APART}."


def why(decision: Decision, policy: RoutingPolicy, *, split: bool, moved: bool = False) -> str:
    """split: a prefill pool is configured. moved: the attempt goes on with KV that there is."""
    if moved:
        return _MOVED
    match decision.reason:
        case reason if reason == ALONE:
            return _ALONE
        case reason if reason == NO_PREFILL:
            return f"{_LOCAL}: {_nobody(decision.candidates, split=split)}"
        case reason if reason == SHORT:
            return f"{_LOCAL}: {_short(decision.uncached_tokens, policy)}"
        case reason if reason == CHEAPER:
            return (
                f"{_LOCAL}: that is predicted to cost less, "
                f"{_both(decision)}, for {_tokens(decision.uncached_tokens)}."
            )
        case _:
            return f"{_APART}: {_apart(decision, policy)}"


def _both(decision: Decision) -> str:
    return f"{decision.local_s or 0.0:.4f} s against {decision.remote_s or 0.0:.4f} s apart"


def _apart(decision: Decision, policy: RoutingPolicy) -> str:
    if decision.remote_s is not None:
        return (
            f"that is predicted to cost less, {decision.remote_s:.4f} s against "
            f"{decision.local_s or 0.0:.4f} s on decode alone, "
            f"for {_tokens(decision.uncached_tokens)}."
        )
    limit = f"the input has more than {policy.short} tokens that decode has not cached"
    if policy.by_speed:
        return f"{limit}, and not all of these workers had measured their speeds."
    return f"{limit} (local_prefill_tokens)."


def _short(uncached_tokens: int, policy: RoutingPolicy) -> str:
    said = f"{_tokens(uncached_tokens)}, and up to {policy.short} are not worth a hand-over"
    if policy.by_speed:
        return f"{said} while not all of these workers have measured their speeds."
    return f"{said} (local_prefill_tokens)."


def _nobody(candidates: Iterable[Candidate], *, split: bool) -> str:
    """What became of the prefill workers."""
    seen = [c for c in candidates if c.identity.role == "prefill"]
    if not seen:
        if split:
            return "a prefill pool is configured, but this router knows no live worker of it."
        return "this router has no prefill pool."
    fates = Counter((c.filter_reason, c.detail[:MAX_DETAIL]) for c in seen)
    told = "; ".join(_filter_reason(*key, count) for key, count in fates.most_common(4))
    return f"no prefill worker could take it ({told})."


def _filter_reason(filter_reason: FilterReason, detail: str, count: int) -> str:
    which = "1 worker" if count == 1 else f"{count} workers"
    return f"{which}: {filter_reason.value}" + (f", {detail}" if detail else "")


def _tokens(count: int) -> str:
    return f"{count} uncached {'token' if count == 1 else 'tokens'}"
