"""From a valid request and the ids of its prompt to the first attempt, within a model's limits.

Where a request has no seed, `seed_of` makes one: it is in the answer, so that the same request with
it gets the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from batonlm.core.errors import ContextLengthExceeded, InvalidArgument
from batonlm.core.kvcache.prefix import HASH_BYTES, UNIT_TOKENS
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.prompt_logprobs import MAX_BYTES, entries_bytes
from batonlm.core.request.request import Request, SamplingParams, StopParams

SEED_BITS = 53
"""Bits of a seed that is made: every JSON reader represents them exactly."""


def seed_of(request: Request, stream_id: str) -> int:
    """Returns the request's seed, or the one that follows from a random id, so that whoever has
    both the request and the id can run it again."""
    if request.seed is not None:
        return request.seed
    digest = blake2b(stream_id.encode(), digest_size=8, person=b"baton seed").digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def check_size(request: Request, num_prompt: int) -> None:
    """Raises InvalidArgument when the requested information about one prompt is too large."""
    num_top = request.prompt_logprobs
    if num_top is not None and entries_bytes(num_prompt, num_top) > MAX_BYTES:
        most = MAX_BYTES // entries_bytes(1, num_top)
        raise InvalidArgument(
            f"prompt_logprobs with {num_top} alternatives are told of prompts of at most {most} "
            f"tokens; this one has {num_prompt}.",
            field="prompt_logprobs",
        )


def resolve_stop(request: Request, num_prompt: int, model: ModelDescription) -> StopParams:
    """Checks that prompt and output fit the model, and fills in the longest output. Raises
    InvalidArgument."""
    if num_prompt == 0:
        raise InvalidArgument("The prompt has no tokens.", field="prompt")
    room = model.max_model_len - num_prompt
    if room < request.least_room:
        raise ContextLengthExceeded(
            f"This model's context is {model.max_model_len} tokens: {num_prompt} of prompt and "
            f"{request.max_tokens or 'at least 1'} of output do not fit.",
            field="prompt" if room < 1 else "max_tokens",
        )
    max_tokens = room if request.max_tokens is None else min(room, request.max_tokens)
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
    """Raises InvalidArgument for token ids outside the vocabulary, which a worker would use as
    indices."""
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
    """Returns the prompt truncated as requested, and the hashes that still apply to it."""
    most = request.truncate_prompt_tokens
    if most == -1:
        most = model.max_model_len - request.least_room
    if most is None or most < 1 or len(prompt) <= most:
        return prompt, prefix_hashes
    if request.truncation_side == "right":
        return prompt[:most], prefix_hashes[: most // UNIT_TOKENS * HASH_BYTES]
    return prompt[-most:], b""


def first_attempt(
    request: Request,
    request_id: str,
    prompt: tuple[int, ...],
    seed: int,
    stop: StopParams,
    adapter: str = "",
) -> Attempt:
    """Returns the attempt that runs all choices of a request from its prompt. stop: from
    `resolve_stop`. adapter: its digest, or "" for the model alone."""
    return Attempt(
        request_id,
        attempt=0,
        choices=tuple(range(request.n)),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=replace(request.sampling, seed=seed),
        stop=stop,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant.name,
        weight=request.tenant.weight,
        grammar=request.grammar,
        adapter=adapter,
        no_speculation=request.no_speculation,
    )


def scoring(first: Attempt, request_id: str, num_top: int) -> Attempt:
    """Returns the attempt that finds the log-probabilities of a prompt's tokens, which runs before
    the request's own.

    It generates one token that is discarded, reuses no cached KV, because the logits of every
    position are needed, and leaves its own KV in the prefix cache for the run that follows.
    """
    return replace(
        first,
        request_id=request_id,
        choices=(0,),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=1, ignore_eos=True),
        grammar=None,
        prompt_logprobs=num_top,
    )
