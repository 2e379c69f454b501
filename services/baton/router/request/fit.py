"""Whether a request fits the model that it asks for, and what it leaves open; knows no workers."""

from __future__ import annotations

from baton.core.errors import ContextLengthExceeded, InvalidArgument
from baton.core.kvcache.prefix import HASH_BYTES, UNIT_TOKENS
from baton.core.request.model import ModelDescription
from baton.core.request.request import Request, StopParams


def resolve_stop(request: Request, num_prompt: int, model: ModelDescription) -> StopParams:
    """Checks that prompt and output fit the model, and fills in the longest output."""
    if num_prompt == 0:
        raise InvalidArgument("The prompt has no tokens.", field="prompt")
    room = model.max_model_len - num_prompt
    if room < max(1, request.max_tokens or 0):
        raise ContextLengthExceeded(
            f"This model's context is {model.max_model_len} tokens: {num_prompt} of prompt and "
            f"{request.max_tokens or 'at least 1'} of output do not fit.",
            field="prompt" if room < 1 else "max_tokens",
        )
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if request.min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens must be at most {max_tokens}, the longest output.", field="min_tokens"
        )
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        stop_strings=request.stop_strings,
        include_stop_string=request.include_stop_string,
    )


def check_vocabulary(request: Request, model: ModelDescription) -> None:
    """Token ids that a worker would index with."""
    fields = {
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.sampling.allowed_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in request.sampling.logit_bias),
    }
    for field, token_ids in fields.items():
        if any(token_id >= model.vocab_size for token_id in token_ids):
            raise InvalidArgument(
                f"{field} must hold token ids below {model.vocab_size}.", field=field
            )


def truncated(
    request: Request, prompt: tuple[int, ...], prefix_hashes: bytes, model: ModelDescription
) -> tuple[tuple[int, ...], bytes]:
    """The prompt as far as the request wants it, and the hashes that still hold of it."""
    most = request.truncate_prompt_tokens
    if most == -1:
        most = model.max_model_len - max(1, request.max_tokens or 1)
    if most is None or most < 1 or len(prompt) <= most:
        return prompt, prefix_hashes
    if request.truncation_side == "right":
        return prompt[:most], prefix_hashes[: most // UNIT_TOKENS * HASH_BYTES]
    return prompt[-most:], b""
