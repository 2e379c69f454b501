"""The output of one choice: accepted tokens, who may append to them, and where they end.

This log is the buffer of a request and all that is needed to continue it elsewhere.

Fencing. Tokens come as (attempt, position, ids); a message may start below the next position and
reach beyond it.

    attempt is not the current one   dropped: an older attempt's worker is still talking
    at the next position             accepted
    below it                         a duplicate, dropped
    above it                         PositionGap: tokens are missing, the attempt cannot go on
    after the end                    dropped
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request.attempt import ChoiceTokens, Logprobs
from baton.core.request.request import FinishReason


class PositionGap(Exception):
    """Tokens arrived above the next position of the current attempt: a protocol fault."""


class TokenLog:
    """Append-only but for `truncate`. Positions are output positions of the choice, from 0."""

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.attempt: int | None = None
        """The attempt that may append, or None while none runs."""
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        """The end-of-sequence or stop token that ended the choice; it is the last token."""
        self.stop_string: str | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_logprobs(self) -> bool:
        """Whether the workers were asked for log-probabilities, and told the first."""
        return bool(self._logprobs)

    def token_ids(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        return tuple(self._token_ids[start:end])

    def logprobs(self, start: int = 0, end: int | None = None) -> Sequence[Logprobs]:
        """One entry a token, or none at all when the workers were not asked for them."""
        return self._logprobs[start:end]

    def accept(self, tokens: ChoiceTokens) -> int:
        """Appends what is new in the message; returns how many tokens that was.

        Raises PositionGap when the message begins above the next position.
        """
        if tokens.key.attempt != self.attempt or self.finish_reason is not None:
            return 0
        known = len(self._token_ids) - tokens.position
        if known < 0:
            raise PositionGap
        if known > len(tokens.token_ids):
            return 0
        fresh = tokens.token_ids[known:] if known else tokens.token_ids
        self._token_ids.extend(fresh)
        if tokens.logprobs:
            self._logprobs.extend(tokens.logprobs[known:])
        if tokens.finish_reason is not None:
            self.finish_reason = tokens.finish_reason
            self.stop_token_id = tokens.stop_token_id
        return len(fresh)

    def truncate(self, position: int, stop_string: str) -> None:
        """Ends the choice at the token that completed a stop string, and forgets what follows it.

        Overrides an end at a later position: the client must not learn of tokens behind the stop.
        Raises PositionGap when that token was never accepted.
        """
        if position >= len(self):
            raise PositionGap
        del self._token_ids[position + 1 :]
        del self._logprobs[position + 1 :]
        self.finish_reason = FinishReason.STOP
        self.stop_token_id = None
        self.stop_string = stop_string
