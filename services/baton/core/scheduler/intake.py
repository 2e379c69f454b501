"""Intake, the door of a scheduler: a valid attempt becomes a SequenceGroup."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from baton.core.errors import ContextLengthExceeded, InvalidArgument
from baton.core.kvcache.prefix import PrefixChain, namespace
from baton.core.request.attempt import Attempt, ChoiceTokens
from baton.core.request.model import ModelDescription
from baton.core.request.prompt_logprobs import MAX_BYTES, entries_bytes
from baton.core.scheduler.plan import CompiledGrammar
from baton.core.scheduler.sequence import Sequence, SequenceGroup, StopRule


class AttemptIntake:
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

    def admit(
        self,
        attempt: Attempt,
        now: float,
        *,
        max_unconfirmed: int = 0,
        grammar: CompiledGrammar | None = None,
    ) -> SequenceGroup:
        """grammar: the attempt's, compiled. Raises InvalidArgument or ContextLengthExceeded, naming
        the field."""
        self._check(attempt)
        if (grammar is None) != (attempt.grammar is None):
            raise InvalidArgument("This worker has no way to follow it.", field="grammar")
        rule = StopRule(attempt, self._eos, self._max_model_len)
        sequences = []
        for choice in attempt.choices:
            matcher = None if grammar is None else grammar.matcher()
            sequences.append(
                Sequence(self._next_id, attempt, choice, rule, max_unconfirmed, matcher)
            )
            self._next_id += 1
        chain = PrefixChain(
            namespace(attempt.cache_salt, self._model_digest),
            namespace(attempt.cache_salt, self._tokenizer_digest),
            self._block_size,
        )
        return SequenceGroup(sequences, chain, now)

    def first_tokens(
        self, shared: SequenceGroup, tokens: Tokens[ChoiceTokens]
    ) -> dict[int, ChoiceTokens]:
        """The next token of every sequence, by choice. Raises InvalidArgument if one lacks or is no
        token of this model."""
        # By choice: a worker that ran it before says its number of the attempt.
        first = {g.key.choice: g for g in tokens if g.key[0] == shared.key.request_id}
        for sequence in shared.sequences:
            given = first.get(sequence.key.choice)
            if given is None or given.position != sequence.position or len(given.token_ids) != 1:
                raise InvalidArgument("Every choice needs the token of its next position.")
            self.check_token(given.token_ids[0], "tokens")
        return first

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
        self._check_ids(attempt.token_ids)
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
        if attempt.prompt_logprobs is not None:
            self._check_scores(size, attempt.prompt_logprobs)
        for token_id, _ in attempt.sampling.logit_bias:
            self.check_token(token_id, "logit_bias")
        for token_id in attempt.sampling.allowed_token_ids:
            self.check_token(token_id, "allowed_token_ids")
        # Below min_tokens the sampler bans these, row by row of one tensor.
        for token_id in attempt.stop.stop_token_ids:
            self.check_token(token_id, "stop_token_ids")

    def _check_ids(self, token_ids: Tokens[int]) -> None:
        self.check_token(min(token_ids), "token_ids")
        self.check_token(max(token_ids), "token_ids")

    def _check_scores(self, size: int, num_top: int) -> None:
        if num_top > self._vocab_size or entries_bytes(size, num_top) > MAX_BYTES:
            raise InvalidArgument(
                f"{num_top} alternatives to each of {size} tokens are too many.",
                field="prompt_logprobs",
            )
