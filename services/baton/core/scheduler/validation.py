"""validate_attempt, what an attempt must be like to run on one worker's model.

Ranges that need no model are checked where a message is read (`baton.rpc.convert`).
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.errors import ContextLengthExceeded, InvalidArgument
from baton.core.request.attempt import Attempt
from baton.core.request.model import ModelDescription
from baton.core.request.prompt_logprobs import MAX_BYTES, entries_bytes


def validate_attempt(attempt: Attempt, model: ModelDescription, max_positions: int) -> None:
    """Raises InvalidArgument or ContextLengthExceeded, naming the field.

    max_positions: an input has fewer, so that one token fits behind it.
    """
    ids = attempt.token_ids
    if ids:
        validate_ids((min(ids), max(ids)), model, "token_ids")
    validate_sizes(attempt, max_positions)
    num_top = attempt.prompt_logprobs
    if num_top is not None and (
        num_top > model.vocab_size or entries_bytes(len(ids), num_top) > MAX_BYTES
    ):
        raise InvalidArgument(
            f"{num_top} alternatives to each of {len(ids)} tokens are too many.",
            field="prompt_logprobs",
        )
    validate_ids((t for t, _ in attempt.sampling.logit_bias), model, "logit_bias")
    validate_ids(attempt.sampling.allowed_token_ids, model, "allowed_token_ids")
    # Below min_tokens the sampler bans these, row by row of one tensor.
    validate_ids(attempt.stop.stop_token_ids, model, "stop_token_ids")


def validate_sizes(attempt: Attempt, max_positions: int) -> None:
    """The part that needs no token's value. Raises as `validate_attempt`."""
    size = len(attempt.token_ids)
    if size == 0:
        raise InvalidArgument("The input has no tokens.", field="token_ids")
    if not 0 < attempt.num_prompt_tokens <= size:
        raise InvalidArgument(
            f"The prompt's length lies between 1 and {size}.", field="num_prompt_tokens"
        )
    if size >= max_positions:
        raise ContextLengthExceeded(
            f"The input has {size} tokens; with room for one more this worker takes at most "
            f"{max_positions - 1}.",
            field="token_ids",
        )
    if not attempt.choices or len(set(attempt.choices)) != len(attempt.choices):
        raise InvalidArgument("Choices are named once each, at least one.", field="choices")
    if attempt.position >= attempt.stop.max_tokens:
        raise InvalidArgument(
            f"There are {attempt.position} output tokens of at most {attempt.stop.max_tokens}.",
            field="max_tokens",
        )


def validate_ids(token_ids: Iterable[int], model: ModelDescription, field: str) -> None:
    """Raises InvalidArgument for what is no token id of this model."""
    if not all(0 <= token_id < model.vocab_size for token_id in token_ids):
        raise InvalidArgument(f"Token ids lie between 0 and {model.vocab_size - 1}.", field=field)
