"""The record of one request, kept while it runs and for a while afterwards.

It has the request's attempts, the reasons for their placement and their outcome, and the inputs
that reproduce its tokens. It contains counts, times, decisions and names only. The token ids of the
prompt are kept when replays are (`RequestRecord.replay`); its text is never kept.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from batonlm.core.errors import BatonError, Reason
from batonlm.core.observe.stages import StageClock, StageTimes
from batonlm.core.request.attempt import Phase, TokenLog
from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.request.request import FinishReason, Grammar, SamplingParams, StopParams
from batonlm.core.routing.routing import (
    ADOPTS,
    ALONE,
    CHEAPER,
    NO_PREFILL,
    RETURNS,
    SHORT,
    Candidate,
    Decision,
    FilterReason,
    RoutingPolicy,
)


def packed(token_ids: Sequence[int]) -> bytes:
    """Returns token ids in the form in which they travel: little-endian int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(ids: bytes) -> array[int]:
    """Reverses `packed`."""
    found = array("i", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def digest(token_ids: Sequence[int]) -> str:
    """Returns the sha256 of packed token ids in hex: it identifies tokens without revealing
    them."""
    return sha256(packed(token_ids)).hexdigest()


@dataclass(frozen=True, slots=True)
class Replay:
    """What is needed to run a request again and compare its output."""

    model: ModelDescription
    prompt: bytes
    """Token ids as `packed` returns them."""
    n: int
    sampling: SamplingParams
    """Includes the seed in use."""
    stop: StopParams
    grammar: Grammar | None = None
    exact: bool = True
    """Whether every worker that served the request ran in exact mode."""
    digests: tuple[str, ...] = ()
    """One per choice, once the request is over."""
    output_tokens: tuple[int, ...] = ()
    """One per choice, once the request is over."""

    @property
    def size(self) -> int:
        grammar = len(self.grammar.text) if self.grammar is not None else 0
        lists = len(self.sampling.logit_bias) * 2 + len(self.sampling.allowed_token_ids)
        return len(self.prompt) + grammar + 32 * lists + 160 * self.n

    def ended(self, outputs: Sequence[Sequence[int]]) -> Replay:
        """outputs: token ids of each choice."""
        return replace(
            self,
            digests=tuple(digest(ids) for ids in outputs),
            output_tokens=tuple(len(ids) for ids in outputs),
        )


BEST_OF_A_ROLE = 4
"""Most candidates of a role that are recorded: the best ones, and some that were filtered."""

MAX_LOSSES = 4
MAX_TEXT = 300
"""Most characters of one sentence."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A failure on one phase of an attempt."""

    phase: Phase
    reason: Reason
    message: str
    at_s: float
    """Seconds since the request arrived."""


@dataclass(slots=True)
class PrefixRecord:
    """The beginning of an input that was to come from another worker's cache."""

    sender: WorkerIdentity
    planned_tokens: int
    """What that worker was believed to have of the input."""
    reason: str
    """Why the attempt did not run there."""
    tokens: int = 0
    """What came."""
    outcome: str = ""
    """As the worker reports it; empty until then."""
    collect_s: float = 0.0
    """What it took, as the worker reports it."""


@dataclass(slots=True)
class AttemptRecord:
    """Where one attempt ran, why, and its outcome. Names that end in _s are seconds."""

    number: int
    position: int
    """Output tokens that were accepted before the attempt."""
    input_tokens: int
    """Prompt tokens and the accepted output tokens."""
    choices: int
    moved: bool
    prefill: WorkerIdentity | None
    decode: WorkerIdentity | None
    why: str
    """One sentence on the placement."""
    began_s: float
    """Seconds since the request arrived."""
    candidates: tuple[Candidate, ...] = ()
    """The best few of each role, best first."""
    others: int = 0
    """Number of candidates that are not recorded."""
    uncached_tokens: int = 0
    predicted_first_token_s: float | None = None
    local_s: float | None = None
    remote_s: float | None = None
    """This and the three fields above are those of Decision."""
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_cached_tokens: int | None = None
    """This and the two fields above are reported by the prefill worker; None until then."""
    decode_cached_tokens: int | None = None
    kv_bytes: int = 0
    """Bytes that were handed over."""
    kv_wait_s: float | None = None
    """From the reservation of decode's blocks until decode had all KV, as decode reports it."""
    kv_s: float | None = None
    """From the attempt's start until decode had all KV."""
    restored: Mapping[str, int] | None = None
    """Input tokens whose KV came from tiers of the worker that computed it, by tier; None where
    none can have had any."""
    restore_s: float = 0.0
    """What that took, as the worker reports it."""
    prefix: PrefixRecord | None = None
    """None where no prefix was to be collected."""
    ended_s: float | None = None
    """Seconds since the request arrived."""
    failed: bool = False
    """Whether the attempt was over before all of its choices had ended or left it."""
    losses: list[Loss] = field(default_factory=list)

    def lost(self, phase: Phase, error: BatonError, at_s: float) -> None:
        if len(self.losses) < MAX_LOSSES:
            self.losses.append(Loss(phase, error.reason, error.message[:MAX_TEXT], at_s))

    def ended(self, at_s: float, *, well: bool) -> None:
        """Records the end. Later calls have no effect."""
        if self.ended_s is None:
            self.ended_s, self.failed = at_s, not well


def best_few(candidates: Iterable[Candidate]) -> tuple[tuple[Candidate, ...], int]:
    """Returns the candidates to record, in their order, and the number of the others."""
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
"""Most attempts that are recorded: the first half of them and the newest ones."""

BASE_BYTES = 3000
ATTEMPT_BYTES = 6000
"""Approximate upper bound in bytes of a record and of each of its attempts; texts are cut to it."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """How one choice ended."""

    output_tokens: int
    finish_reason: FinishReason | None
    """None when the choice had not ended before the request did."""
    stop_string: bool = False
    """Whether a stop string ended it."""
    saved_steps: int = 0
    """How many steps more its tokens would have taken without drafts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed."""

    reason: Reason
    message: str
    """The message that the client got."""


@dataclass(slots=True)
class RequestRecord:
    """The record of one request."""

    request_id: str
    tenant: str
    arrived_at: float
    """Seconds since the Unix epoch."""
    asked: str
    """One of "chat", "text" and "tokens"."""
    priority: int
    policy: RoutingPolicy
    """The policy that chooses its workers."""
    split: bool
    """Whether a prefill pool is configured."""
    clock: StageClock | None
    """None once the request is over."""
    model: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    cached_tokens: int = 0
    attempts: list[AttemptRecord] = field(default_factory=list)
    """The attempts that are recorded."""
    num_attempts: int = 0
    """The number of all attempts."""
    choices: tuple[ChoiceEnd, ...] = ()
    """Set once the request is over."""
    failure: Failure | None = None
    times: StageTimes | None = None
    """Set once the request is over; until then, see `so_far`."""
    replay: Replay | None = None

    @property
    def over(self) -> bool:
        return self.times is not None

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def size(self) -> int:
        """Approximate upper bound of the record's size in bytes."""
        replay = self.replay.size if self.replay is not None else 0
        return BASE_BYTES + ATTEMPT_BYTES * len(self.attempts) + 64 * len(self.choices) + replay

    def attempt(self, number: int) -> AttemptRecord | None:
        """Returns the attempt of that number, or None when it is not recorded."""
        return next((each for each in reversed(self.attempts) if each.number == number), None)

    def add(self, attempt: AttemptRecord) -> None:
        self.num_attempts += 1
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            del self.attempts[MAX_ATTEMPTS // 2]

    def accepted(self, model: str, prompt_tokens: int, stop: StopParams) -> None:
        """Records the model, the prompt's length and the longest output."""
        self.model, self.prompt_tokens = model, prompt_tokens
        self.max_tokens = stop.max_tokens

    def computed(self, model: str, prompt_tokens: int) -> None:
        """Records the model and the tokens of a request that generates nothing."""
        self.model, self.prompt_tokens = model, prompt_tokens

    def runs_on(self, model: ModelDescription) -> None:
        """Records another model of the same name. Allowed only before the request has a token."""
        if self.replay is not None:
            self.replay = replace(self.replay, model=model)

    def served(self, *, exact: bool) -> None:
        """Records the workers of an attempt. exact: all of them run in exact mode."""
        if self.replay is not None and not exact:
            self.replay = replace(self.replay, exact=False)

    def so_far(self, now: float) -> StageTimes:
        """Returns the stage times until now. now: a reading of the stage clock."""
        if self.times is not None:
            return self.times
        return self.clock.times(now) if self.clock is not None else StageTimes()

    def ended(
        self, error: BaseException | None, logs: Sequence[TokenLog], cached_tokens: int
    ) -> None:
        """Records the end of the request, whose stages are over. error: None on success; an
        exception that is no BatonError means that the client left. Only numbers and digests of the
        logs are kept."""
        if self.over or self.clock is None:
            return
        self.times, self.clock = self.clock.times(), None
        self.cached_tokens = cached_tokens
        self.choices = tuple(
            ChoiceEnd(len(log), log.finish_reason, log.stop_string is not None, log.saved_steps)
            for log in logs
        )
        if isinstance(error, BatonError):
            self.failure = Failure(error.reason, error.message[:MAX_TEXT])
        elif error is not None:
            self.failure = Failure(Reason.CANCELLED, "The client left.")
        if self.replay is not None:
            self.replay = self.replay.ended([log.token_ids() for log in logs])


MAX_DETAIL = 200
"""Most characters of the detail that is added to a worker's filter reason."""

_MOVED = "Its KV came from another decode worker: nothing was prefilled."
_RETURNED = "Its KV did not arrive at another decode worker: it went on where it was."
_ADOPTED = "Another router had begun it, and is gone: it went on where it was."
_ALONE = "Every choice ends at its first token, which prefill makes: no decode is needed."
_LOCAL = "Prefilled on decode"
_APART = "Prefill and decode ran apart"


def outline(attempt: AttemptRecord) -> str:
    """Returns the sentence of `why` without facts about workers, for clients that may not see
    them."""
    if attempt.moved:
        return attempt.why if attempt.why in (_RETURNED, _ADOPTED) else _MOVED
    if attempt.decode is None:
        return _ALONE
    return f"{_LOCAL if attempt.prefill is None else _APART}."


def why(decision: Decision, policy: RoutingPolicy, *, split: bool, moved: bool = False) -> str:
    """Returns the sentence that explains a placement. split: a prefill pool is configured. moved:
    the attempt continues with existing KV."""
    if moved:
        return {RETURNS: _RETURNED, ADOPTS: _ADOPTED}.get(decision.reason, _MOVED)
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
    if not policy.short:
        return "every input is handed over that decode has not cached (--prefer-split)."
    limit = f"the input has more than {policy.short} tokens that decode has not cached"
    if policy.by_speed:
        return f"{limit}, and not all of these workers had measured their speeds."
    return f"{limit} (local_prefill_tokens)."


def _short(uncached_tokens: int, policy: RoutingPolicy) -> str:
    text = f"{_tokens(uncached_tokens)}, and up to {policy.short} are not worth a hand-over"
    if policy.by_speed:
        return f"{text} while not all of these workers have measured their speeds."
    return f"{text} (local_prefill_tokens)."


def _nobody(candidates: Iterable[Candidate], *, split: bool) -> str:
    """Explains why no prefill worker was used."""
    seen = [c for c in candidates if c.identity.role == "prefill"]
    if not seen:
        if split:
            return "a prefill pool is configured, but this router knows no live worker of it."
        return "this router has no prefill pool."
    fates = Counter((c.filter_reason, c.detail[:MAX_DETAIL]) for c in seen)
    reasons = "; ".join(_filter_reason(*key, count) for key, count in fates.most_common(4))
    return f"no prefill worker could take it ({reasons})."


def _filter_reason(filter_reason: FilterReason, detail: str, count: int) -> str:
    which = "1 worker" if count == 1 else f"{count} workers"
    return f"{which}: {filter_reason.value}" + (f", {detail}" if detail else "")


def _tokens(count: int) -> str:
    return f"{count} uncached {'token' if count == 1 else 'tokens'}"
