"""One try at running a request on one set of workers, and the tokens that come out of it.

Knows nothing of how workers run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.request.grammar import Grammar
from baton.core.request.request import FinishReason, SamplingParams, StopParams


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
