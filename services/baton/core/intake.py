"""Intake, the door of a scheduler: a valid attempt becomes a SharedInput; knows no queue."""

from __future__ import annotations

from baton.core.attempt import Attempt
from baton.core.errors import ContextLengthExceeded, InvalidArgument
from baton.core.model import ModelDescription
from baton.core.prefix import PrefixChain, namespace
from baton.core.sequence import Sequence
from baton.core.shared_input import SharedInput
from baton.core.stops import StopRule


class Intake:
    """What attempts may look like on one worker.

    max_positions: an input has fewer, so that one token fits behind it. max_model_len: where a
    choice ends at the latest.
    """

    def __init__(
        self, model: ModelDescription, *, block_size: int, max_positions: int, max_model_len: int
    ):
        self._block_size = block_size
        self._max_positions = max_positions
        self._max_model_len = max_model_len
        self._eos = model.eos_token_ids
        self._vocab_size = model.vocab_size
        self._model_digest = model.digest
        self._tokenizer_digest = model.tokenizer_digest
        self._next_id = 0

    def admit(self, attempt: Attempt, now: float, *, max_unconfirmed: int = 0) -> SharedInput:
        """Raises InvalidArgument or ContextLengthExceeded, naming the field."""
        self._check(attempt)
        rule = StopRule(attempt, self._eos, self._max_model_len)
        sequences = []
        for choice in attempt.choices:
            sequences.append(Sequence(self._next_id, attempt, choice, rule, max_unconfirmed))
            self._next_id += 1
        chain = PrefixChain(
            namespace(attempt.cache_salt, self._model_digest),
            namespace(attempt.cache_salt, self._tokenizer_digest),
            self._block_size,
        )
        return SharedInput(sequences, chain, now)

    def check_token(self, token_id: int, field: str) -> None:
        """Raises InvalidArgument for what is no token id of this model."""
        if not 0 <= token_id < self._vocab_size:
            raise InvalidArgument(
                f"Token ids lie between 0 and {self._vocab_size - 1}.", field=field
            )

    def _check(self, attempt: Attempt) -> None:
        size = len(attempt.token_ids)
        if size == 0:
            raise InvalidArgument("The input has no tokens.", field="token_ids")
        self.check_token(min(attempt.token_ids), "token_ids")
        self.check_token(max(attempt.token_ids), "token_ids")
        if not 0 < attempt.num_prompt_tokens <= size:
            raise InvalidArgument(
                f"The prompt's length lies between 1 and {size}.", field="num_prompt_tokens"
            )
        if size >= self._max_positions:
            raise ContextLengthExceeded(
                f"The input has {size} tokens; with room for one more this worker takes at most "
                f"{self._max_positions - 1}.",
                field="token_ids",
            )
        if not attempt.choices or len(set(attempt.choices)) != len(attempt.choices):
            raise InvalidArgument("Choices are named once each, at least one.", field="choices")
        if attempt.position >= attempt.stop.max_tokens:
            raise InvalidArgument(
                f"There are {attempt.position} output tokens of at most {attempt.stop.max_tokens}.",
                field="max_tokens",
            )
        for token_id, _ in attempt.sampling.logit_bias:
            self.check_token(token_id, "logit_bias")
        # Below min_tokens the sampler bans these, row by row of one tensor.
        for token_id in attempt.stop.stop_token_ids:
            self.check_token(token_id, "stop_token_ids")
