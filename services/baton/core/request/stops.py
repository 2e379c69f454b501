"""Decides where a token is sampled whether it ends its choice; knows nothing of stop strings."""

from __future__ import annotations

from baton.core.request.attempt import Attempt
from baton.core.request.request import FinishReason


class StopRule:
    """The ends that one attempt's tokens can meet.

    max_positions: most positions a choice may have, prompt included. end_ids: tokens that end it;
    before output position min_tokens they must not be drawn. The model's own end an answer that
    follows a grammar even when they are to be ignored: then they are drawn only when nothing else
    can be (see `Sequence.sample_row`).
    """

    __slots__ = ("_banned", "_ignored", "_max_tokens", "end_ids", "max_positions", "min_tokens")

    def __init__(self, attempt: Attempt, eos_token_ids: tuple[int, ...], max_model_len: int):
        stop = attempt.stop
        ignored = eos_token_ids if stop.ignore_eos else ()
        bound = attempt.grammar is not None
        own = eos_token_ids if bound or not stop.ignore_eos else ()
        ends = dict.fromkeys((*own, *stop.stop_token_ids))
        self._banned = tuple(ends)
        self._ignored = tuple(t for t in ignored if bound and t not in stop.stop_token_ids)
        self.end_ids = frozenset(ends)
        self.min_tokens = stop.min_tokens
        self._max_tokens = min(stop.max_tokens, max_model_len - attempt.num_prompt_tokens)
        self.max_positions = attempt.num_prompt_tokens + self._max_tokens

    def banned(self, position: int) -> tuple[int, ...]:
        """Tokens that must not be drawn at an output position: too early for an end."""
        return self._banned if position < self.min_tokens else self._ignored

    def ends(self, position: int, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Why the token drawn at an output position ends its choice, and itself if it is an end
        token; (None, None) when the choice goes on."""
        if token_id in self.end_ids:
            return FinishReason.STOP, token_id
        if position + 1 >= self._max_tokens:
            return FinishReason.LENGTH, None
        return None, None
