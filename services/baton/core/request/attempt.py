"""One try at running a request on one set of workers, and the tokens that come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from baton.core.request.grammar import Grammar
from baton.core.request.request import FinishReason, SamplingParams, StopParams

# Where an attempt stands, and what may happen to it: one table.
#
# An attempt has one or two phases:
#
#     PLACING ──► PREFILLING                      every choice ends at token 0: no decode worker
#         │
#         ├─────► PAIRED ──► HANDING_OVER ──► DECODING     prefill answers first (the usual order)
#         │          └──────────────────────────▲         or decode has all KV first
#         ├─────────────────────────────────────┘         decode prefills by itself
#         └─────► MOVING ──► DECODING                     a decode worker gives it to another one
#
# Any of them ends as ENDED (no choice is left to run in it) or FAILED (its unfinished choices wait
# for another attempt). Prefill lost after decode has all KV is no loss; prefill lost while its KV
# is being collected is decode's to report.


class Phase(Enum):
    """A part of an attempt that runs on one worker."""

    PREFILL = auto()
    DECODE = auto()


class AttemptState(Enum):
    """Where an attempt stands."""

    PLACING = auto()
    PREFILLING = auto()
    PAIRED = auto()
    HANDING_OVER = auto()
    MOVING = auto()
    DECODING = auto()
    ENDED = auto()
    FAILED = auto()


class AttemptEvent(Enum):
    """What may happen to an attempt."""

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
    # An answer that leaves a choice unfinished breaks the deal: nobody has its KV.
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
"""Who may hold blocks for an attempt in each state, and has to be told when it is over."""

LOST = {Phase.PREFILL: _E.PREFILL_LOST, Phase.DECODE: _E.DECODE_LOST}


class AttemptKey(NamedTuple):
    """Names one Attempt. The number is unique within the request, whatever its choices."""

    request_id: str
    attempt: int


class SequenceKey(NamedTuple):
    """Names one Sequence everywhere: one choice of one attempt of one request."""

    request_id: str
    choice: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a worker is given to run.

    token_ids: prompt followed by all accepted output tokens; the first num_prompt_tokens are the
    prompt. All choices run from this same input, so choices with different accepted tokens run as
    attempts of their own. prompt_logprobs: how many alternatives to tell with the log-probability
    of each of the prompt's tokens, or None to tell none. remaining_s: time left when the message
    was made, or None. tenant and weight: whose turn it is that it takes, and how large that one's
    turns are.
    """

    request_id: str
    attempt: int
    choices: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    priority: int = 0
    remaining_s: float | None = None
    cache_salt: bytes = b""
    traceparent: str = ""
    tenant: str = ""
    weight: float = 1.0
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None

    @property
    def position(self) -> int:
        """Output position of the next token: how many output tokens are accepted."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def longest_output(self) -> int:
        """Tokens that all its choices may still make."""
        return len(self.choices) * max(0, self.stop.max_tokens - self.position)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)

    def keys(self) -> tuple[SequenceKey, ...]:
        return tuple(SequenceKey(self.request_id, c, self.attempt) for c in self.choices)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities of one sampled token, before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


class ChoiceTokens(NamedTuple):
    """New tokens of one sequence. `position` is the output position of the first one, from 0.

    finish_reason: set when the last token ends the choice; stop_token_id: the last token, when it
    is an end-of-sequence or stop token.
    """

    key: SequenceKey
    position: int
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
