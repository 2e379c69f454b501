"""One attempt to run a request on one set of workers, and the log of the tokens that it yields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from batonlm.core.request.request import FinishReason, Grammar, SamplingParams, StopParams


class Phase(Enum):
    """A part of an attempt that runs on one worker."""

    PREFILL = auto()
    DECODE = auto()


class AttemptState(Enum):
    """The state of an attempt. An attempt has one or two phases:

        PLACING ──► PREFILLING                      every choice ends at token 0: no decode worker
            │
            ├─────► PAIRED ──► HANDING_OVER ──► DECODING     prefill answers first (the usual order)
            │          └──────────────────────────▲         or decode has all KV first
            ├─────────────────────────────────────┘         decode prefills by itself
            └─────► MOVING ──► DECODING                     KV comes from another decode worker

    Every state can end in ENDED (no choice is left to run) or FAILED (unfinished choices wait for
    another attempt). Losing prefill after decode has all KV changes nothing; when prefill is lost
    during the transfer of its KV, decode reports the failure.
    """

    PLACING = auto()
    PREFILLING = auto()
    PAIRED = auto()
    HANDING_OVER = auto()
    MOVING = auto()
    DECODING = auto()
    ENDED = auto()
    FAILED = auto()


class AttemptEvent(Enum):
    """An event in the life of an attempt."""

    PLACED_ON_PREFILL = auto()
    PLACED_ON_BOTH = auto()
    PLACED_ON_DECODE = auto()
    PLACED_TO_MOVE = auto()
    PREFILL_ANSWERED = auto()
    PREFILL_LOST = auto()
    KV_COMPLETE = auto()
    DECODE_LOST = auto()
    NOTHING_LEFT = auto()


_S, _E = AttemptState, AttemptEvent

TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (_S.PLACING, _E.PLACED_ON_PREFILL): _S.PREFILLING,
    (_S.PLACING, _E.PLACED_ON_BOTH): _S.PAIRED,
    (_S.PLACING, _E.PLACED_ON_DECODE): _S.DECODING,
    (_S.PLACING, _E.PLACED_TO_MOVE): _S.MOVING,
    (_S.PLACING, _E.NOTHING_LEFT): _S.ENDED,
    # An answer that leaves a choice unfinished is an error: no decode worker has its KV.
    (_S.PREFILLING, _E.PREFILL_ANSWERED): _S.FAILED,
    (_S.PREFILLING, _E.PREFILL_LOST): _S.FAILED,
    (_S.PREFILLING, _E.NOTHING_LEFT): _S.ENDED,
    (_S.PAIRED, _E.PREFILL_ANSWERED): _S.HANDING_OVER,
    (_S.PAIRED, _E.PREFILL_LOST): _S.FAILED,
    (_S.PAIRED, _E.KV_COMPLETE): _S.DECODING,
    (_S.PAIRED, _E.DECODE_LOST): _S.FAILED,
    (_S.PAIRED, _E.NOTHING_LEFT): _S.ENDED,
    (_S.HANDING_OVER, _E.KV_COMPLETE): _S.DECODING,
    (_S.HANDING_OVER, _E.DECODE_LOST): _S.FAILED,
    (_S.HANDING_OVER, _E.NOTHING_LEFT): _S.ENDED,
    (_S.MOVING, _E.KV_COMPLETE): _S.DECODING,
    (_S.MOVING, _E.DECODE_LOST): _S.FAILED,
    (_S.MOVING, _E.NOTHING_LEFT): _S.ENDED,
    (_S.DECODING, _E.PREFILL_ANSWERED): _S.DECODING,
    (_S.DECODING, _E.PREFILL_LOST): _S.DECODING,
    (_S.DECODING, _E.KV_COMPLETE): _S.DECODING,
    (_S.DECODING, _E.DECODE_LOST): _S.FAILED,
    (_S.DECODING, _E.NOTHING_LEFT): _S.ENDED,
}

OVER = frozenset({_S.ENDED, _S.FAILED})

HOLDERS: dict[AttemptState, frozenset[Phase]] = {
    _S.PLACING: frozenset(),
    _S.PREFILLING: frozenset({Phase.PREFILL}),
    _S.PAIRED: frozenset({Phase.PREFILL, Phase.DECODE}),
    _S.HANDING_OVER: frozenset({Phase.PREFILL, Phase.DECODE}),
    _S.MOVING: frozenset({Phase.DECODE}),
    _S.DECODING: frozenset({Phase.DECODE}),
}
"""The phases that may hold blocks for an attempt in each state, and must be notified when it is
over."""

LOST = {Phase.PREFILL: _E.PREFILL_LOST, Phase.DECODE: _E.DECODE_LOST}


class AttemptKey(NamedTuple):
    """Identifies one Attempt. The attempt number is unique within the request, across its
    choices."""

    request_id: str
    attempt: int


class SequenceKey(NamedTuple):
    """Identifies one Sequence everywhere: one choice of one attempt of one request."""

    request_id: str
    choice: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """The work that a worker receives."""

    request_id: str
    attempt: int
    """Its number within the request."""
    choices: tuple[int, ...]
    """The choices to run. All of them start from the same input; choices with different accepted
    tokens run in separate attempts."""
    token_ids: Sequence[int]
    """The prompt, followed by all accepted output tokens."""
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    priority: int = 0
    remaining_s: float | None = None
    """Seconds left until the deadline when the message was made; None without a deadline."""
    cache_salt: bytes = b""
    traceparent: str = ""
    tenant: str = ""
    """The tenant whose share of the worker the attempt uses."""
    weight: float = 1.0
    """The tenant's share relative to other tenants."""
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each prompt token; None reports
    none."""
    adapter: str = ""
    """The digest of the LoRA adapter to compute with; "" is the model alone."""
    no_speculation: bool = False
    """Whether no drafts of its tokens are computed, also where the worker does that."""

    @property
    def position(self) -> int:
        """The output position of the next token, which is the number of accepted output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def longest_output(self) -> int:
        """The most tokens that all its choices together may still generate."""
        return len(self.choices) * max(0, self.stop.max_tokens - self.position)

    def repeats(self, other: Attempt) -> bool:
        """Whether its choices begin with the prompt alone, and get the tokens that they got as
        choices of another attempt."""
        size = other.num_prompt_tokens
        return (
            len(self.token_ids) == self.num_prompt_tokens == size
            and self.sampling == other.sampling
            and self.stop == other.stop
            and self.grammar == other.grammar
            and self.adapter == other.adapter
            and self.cache_salt == other.cache_salt
            and self.prompt_logprobs is other.prompt_logprobs is None
            and tuple(self.token_ids) == tuple(other.token_ids[:size])
        )

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)

    def keys(self) -> tuple[SequenceKey, ...]:
        return tuple(SequenceKey(self.request_id, c, self.attempt) for c in self.choices)

    def after(self, seconds: float) -> Attempt:
        """The same attempt when so many of its seconds are over."""
        if self.remaining_s is None:
            return self
        return replace(self, remaining_s=max(0.0, self.remaining_s - seconds))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities of one sampled token, before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


class ChoiceTokens(NamedTuple):
    """New tokens of one sequence."""

    key: SequenceKey
    position: int
    """The output position of the first token, counted from 0."""
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] = ()
    finish_reason: FinishReason | None = None
    """Set when the last token ends the choice."""
    stop_token_id: int | None = None
    """The last token, when it is an end-of-sequence or stop token."""
    saved_steps: int = 0
    """How many steps more these tokens would have taken without drafts."""


class PositionGap(Exception):
    """Tokens arrived above the next position of the current attempt, which violates the
    protocol."""


class TokenLog:
    """The output of one choice: its accepted tokens and its end.

    The log buffers the output of a request and suffices to continue it elsewhere. It is append-only
    except for `truncate`. Positions are output positions of the choice, from 0.

    Fencing: tokens arrive as (attempt, position, ids). A message may start below the next position
    and reach beyond it.

        attempt is not the current one   dropped: it is from a worker of an older attempt
        at the next position             accepted
        below it                         a duplicate, dropped
        above it                         PositionGap: tokens are missing, the attempt cannot go on
        after the end                    dropped
    """

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.attempt: int | None = None
        """The attempt that may append, or None while none runs."""
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        """The end-of-sequence or stop token that ended the choice, which is its last token."""
        self.stop_string: str | None = None
        self.saved_steps = 0
        """How many steps more its tokens would have taken without drafts."""
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were requested and the first has arrived."""
        return bool(self._logprobs)

    def token_ids(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        return tuple(self._token_ids[start:end])

    def logprobs(self, start: int = 0, end: int | None = None) -> Sequence[Logprobs]:
        """Returns one entry per token, or an empty sequence when log-probabilities were not
        requested."""
        return self._logprobs[start:end]

    def accept(self, tokens: ChoiceTokens) -> int:
        """Appends the new tokens of the message; returns their number.

        Raises PositionGap when the message begins above the next position.
        """
        if tokens.key.attempt != self.attempt or self.finish_reason is not None:
            return 0
        known = len(self._token_ids) - tokens.position
        if known < 0:
            raise PositionGap
        if known > len(tokens.token_ids):
            return 0
        fresh = tokens.token_ids[known:] if known else tokens.token_ids
        self._token_ids.extend(fresh)
        self.saved_steps += tokens.saved_steps
        if tokens.logprobs:
            self._logprobs.extend(tokens.logprobs[known:])
        if tokens.finish_reason is not None:
            self.finish_reason = tokens.finish_reason
            self.stop_token_id = tokens.stop_token_id
        return len(fresh)

    def truncate(self, position: int, stop_string: str) -> None:
        """Ends the choice at the token that completed a stop string, and discards later tokens.

        This overrides an end at a later position, because the client must not see tokens after the
        stop. Raises PositionGap when the token at the position was never accepted.
        """
        if position >= len(self):
            raise PositionGap
        del self._token_ids[position + 1 :]
        del self._logprobs[position + 1 :]
        self.finish_reason = FinishReason.STOP
        self.stop_token_id = None
        self.stop_string = stop_string
