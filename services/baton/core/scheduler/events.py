"""What schedulers tell about attempts."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.kvcache.block_pool import Extents
from baton.core.request.attempt import AttemptKey, ChoiceTokens, SequenceKey
from baton.core.request.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Planned:
    """Prefill: the input's first chunk is in a step that is about to run.

    extents: where its KV will lie, until it is released or cancelled.
    """

    key: AttemptKey
    extents: Extents


@dataclass(frozen=True, slots=True)
class Computed:
    """Prefill: KV of all positions below num_positions is in the blocks and may be packed.

    cached: how many of them came from this worker's prefix cache.
    """

    key: AttemptKey
    num_positions: int
    cached: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Prefill: token 0 of every choice. queue_s: until its first step; prefill_s: from there on.

    prompt_logprobs: of the input, when asked for.
    """

    key: AttemptKey
    tokens: tuple[ChoiceTokens, ...]
    cached_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """Decode: the attempt's KV is complete, its tokens follow.

    cached_tokens: input tokens whose KV this worker had. wait_s: since it was reserved or added.
    prompt_logprobs: of an input that was computed here, when asked for.
    """

    key: AttemptKey
    cached_tokens: int
    wait_s: float
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Decode: new tokens, one entry a sequence. step: the newest step when they were made."""

    tokens: tuple[ChoiceTokens, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Held:
    """Decode: a sequence has stopped, with all its tokens told and KV of all but the newest one.

    newest: the token that the worker which goes on with it starts from.
    """

    key: SequenceKey
    num_positions: int
    newest: ChoiceTokens


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt, or some choices of it, ended without an answer; nothing of them is left here.

    Prefill: the blocks of one that is kept stay until it is released or cancelled.
    """

    key: AttemptKey
    choices: tuple[int, ...]
    error: BatonError


Event = Planned | Computed | FirstTokens | Started | Tokens | Held | Failed
