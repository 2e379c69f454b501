"""CountingScheduler, core's scheduler for inputs whose tokens are only counted.

How a group is made of an attempt is all that it replaces; it takes one choice a request.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import cast

from baton.core.errors import InvalidArgument
from baton.core.request.attempt import Attempt, ChoiceTokens, Logprobs
from baton.core.request.request import SamplingParams, StopParams
from baton.core.scheduler.plan import CompiledGrammar
from baton.core.scheduler.scheduler import Scheduler
from baton.core.scheduler.sequence import Sequence, SequenceGroup, StopRule
from baton.core.scheduler.validation import validate_sizes
from baton_loadtest.simulator.prompts import NamedChain, Prompt, Text

TOKEN = 0
"""That every step samples for everyone."""

VOCABULARY = 1

_GREEDY = SamplingParams(temperature=0.0)


def attempt_of(
    request_id: str, number: int, prompt: Prompt, output_tokens: int, made: int = 0
) -> Attempt:
    """What workers are given to run; for a `CountingScheduler` only. made: output tokens of the
    attempts before."""
    return Attempt(
        request_id=request_id,
        attempt=number,
        choices=(0,),
        token_ids=cast(tuple[int, ...], Text(prompt, made)),
        num_prompt_tokens=prompt.length,
        sampling=_GREEDY,
        stop=StopParams(max_tokens=output_tokens, ignore_eos=True),
    )


class CountingSequence(Sequence):
    """A sequence that counts its tokens instead of keeping them."""

    __slots__ = ("_text",)

    def __init__(self, sequence_id: int, attempt: Attempt, rule: StopRule, prompt: Prompt):
        super().__init__(sequence_id, attempt, 0, rule)
        self.tokens = self._text = Text(prompt, attempt.position)

    def accept(self, token_id: int, logprobs: Logprobs | None) -> ChoiceTokens:
        self._text.length += 1
        size = self._text.length
        self._last = last = (token_id,)
        position = size - self._num_prompt - 1
        if size >= self.rule.max_positions:
            return ChoiceTokens(self.key, position, last, (), *self.rule.ends(position, token_id))
        return ChoiceTokens(self.key, position, last)

    def advance(self, steps: int) -> None:
        """So many steps have made a token each, and none of them ended it."""
        self._text.length += steps
        self.num_computed_tokens += steps


class CountingScheduler(Scheduler):
    """Takes what `attempt_of` made."""

    def make_group(
        self,
        attempt: Attempt,
        now: float,
        max_unconfirmed: int,
        grammar: CompiledGrammar | None,
        keep: bool,
        receiver: str,
    ) -> SequenceGroup:
        text: Tokens[int] = attempt.token_ids
        if not isinstance(text, Text):
            raise InvalidArgument("The simulator takes prompts that are named.", field="token_ids")
        validate_sizes(attempt, self._max_positions)
        rule = StopRule(attempt, self._model.eos_token_ids, self._max_model_len)
        sequence = CountingSequence(self._take_id(), attempt, rule, text.prompt)
        chain = NamedChain(text.prompt, self._pool.block_size)
        return SequenceGroup([sequence], chain, now, keep=keep, receiver=receiver)
