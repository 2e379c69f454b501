"""What a scheduler reports of attempts, in order, after each step."""

from __future__ import annotations

from dataclasses import dataclass

from batonlm.core.errors import BatonError
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.attempt import AttemptKey, ChoiceTokens, SequenceKey
from batonlm.core.request.prompt_logprobs import PromptLogprobs

# Where sequences stop after their first token:


@dataclass(frozen=True, slots=True)
class Planned:
    """The input's first chunk is in a step that is about to run."""

    key: AttemptKey
    extents: Extents
    """Where its KV will lie, until it is released or cancelled."""


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of all positions below num_positions is in the blocks and may be packed."""

    key: AttemptKey
    num_positions: int
    cached: int
    """How many of them came from this worker's prefix cache."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Token 0 of every choice."""

    key: AttemptKey
    tokens: tuple[ChoiceTokens, ...]
    cached_tokens: int
    queue_s: float
    """Until the first step."""
    prefill_s: float
    """From there on."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the input, when asked for."""


# Where sequences run on:


@dataclass(frozen=True, slots=True)
class KvComplete:
    """All KV of the attempt's input is here, its tokens follow."""

    key: AttemptKey
    cached_tokens: int
    """Input tokens whose KV this worker had."""
    wait_s: float
    """Since it was reserved or added."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of an input that was computed here, when asked for."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One entry for each sequence that got a token."""

    tokens: tuple[ChoiceTokens, ...]
    step: int
    """The newest step when they were made."""


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence has stopped. All its tokens were reported, and all but the newest have KV."""

    key: SequenceKey
    num_positions: int
    newest: ChoiceTokens
    """The token that the worker which goes on with it starts from."""
    extents: Extents
    """Where its KV is, until it is cancelled."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A sequence is another request's from now on."""

    tokens: ChoiceTokens
    """All its output tokens so far, as that request's; they were reported before."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt, or some choices of it, ended without an answer; nothing of them is left here,
    but for the blocks of one that is kept: they stay until it is released or cancelled."""

    key: AttemptKey
    choices: tuple[int, ...]
    error: BatonError


Event = Planned | Computed | FirstTokens | KvComplete | NewTokens | Held | Adopted | AttemptFailed
