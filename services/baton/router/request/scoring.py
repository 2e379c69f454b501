"""How likely a request's own prompt is: a run of its own before the request's, on the same fleet.

It generates one token that nobody sees, reuses no cached KV, because the logits of every position
are needed, and leaves its own in the prefix cache for what follows. Whatever befalls its workers is
the runner's business, as for every run.
"""

from __future__ import annotations

import asyncio
from itertools import chain

from baton.core.errors import InvalidArgument, Unavailable
from baton.core.request.prompt_logprobs import MAX_BYTES, PromptLogprobs, entries_bytes
from baton.core.request.request import (
    Request,
    SamplingParams,
    StopParams,
    TextLogprob,
    TokenLogprobs,
)
from baton.core.request.request_state import RequestState
from baton.router.request.choice_text import TextOptions
from baton.router.request.runner import RequestRunner
from baton.router.request.spelling import Speller

WORDED_AT_ONCE = 1024
"""Entries that are put into words before others get their turn."""

UNREAD = TextOptions((), False, False, (), (), 0, frozenset())
"""Of the token that nobody sees."""


def check_size(request: Request, num_prompt: int) -> None:
    """Raises InvalidArgument for more than is told of one prompt."""
    num_top = request.prompt_logprobs
    if num_top is not None and entries_bytes(num_prompt, num_top) > MAX_BYTES:
        most = MAX_BYTES // entries_bytes(1, num_top)
        raise InvalidArgument(
            f"prompt_logprobs with {num_top} alternatives are told of prompts of at most {most} "
            f"tokens; this one has {num_prompt}.",
            field="prompt_logprobs",
        )


def scoring_request_state(
    request: Request, request_id: str, prompt: tuple[int, ...], max_attempts: int
) -> RequestState:
    """A request state that scores the prompt and ends with its first token."""
    return RequestState(
        f"{request_id}-prompt",
        prompt,
        n=1,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=1, ignore_eos=True),
        max_fruitless_attempts=max_attempts,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        prompt_logprobs=request.prompt_logprobs,
    )


async def score(
    runner: RequestRunner, speller: Speller, tokenizer_digest: str, deadline: float
) -> tuple[TokenLogprobs, ...]:
    """The entries of a prompt's tokens, the first one's of no meaning. runner: of a scoring run;
    deadline: on the running loop's clock. Raises BatonError."""
    prompt = runner.request_state.prompt
    await runner.run()
    told = runner.prompt_logprobs
    if told is None:
        # A decode worker's stream broke just when it told them; its token alone came again.
        raise Unavailable("The prompt's log-probabilities were lost.", retry_after_s=1.0)
    names = chain(prompt, told.alternatives())
    texts = await speller.spell(names, tokenizer_digest, deadline)
    return await _worded(prompt, told, texts)


async def _worded(
    prompt: tuple[int, ...], told: PromptLogprobs, texts: dict[int, bytes]
) -> tuple[TokenLogprobs, ...]:
    def word(token_id: int, logprob: float) -> TextLogprob:
        return TextLogprob(token_id, texts[token_id], logprob)

    entries = [TokenLogprobs(word(prompt[0], 0.0))]
    for token_id, entry in zip(prompt[1:], told.entries(), strict=True):
        top = tuple(word(other, value) for other, value in entry.top)
        entries.append(TokenLogprobs(word(token_id, entry.logprob), top))
        if not len(entries) % WORDED_AT_ONCE:
            await asyncio.sleep(0)
    return tuple(entries)
