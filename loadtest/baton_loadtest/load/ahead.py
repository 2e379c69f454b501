"""Makes requests before they are due, as far ahead as memory allows.

Making one takes time that answers to others need, and several may be due at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from baton_loadtest.load.token_ids import Ids, TokenIds
from baton_loadtest.load.workload import Workload

AHEAD_TOKENS = 4_000_000
"""Of prompts that are kept; about 15 bytes each."""


class Ahead:
    """First turns of a workload's sessions, in order. prepare: as a runner's Client has it."""

    def __init__(
        self,
        prepare: Callable[[Sequence[int], int], Any],
        token_ids: TokenIds,
        workload: Workload,
    ) -> None:
        self._prepare, self._token_ids = prepare, token_ids
        self._rest = iter(workload.sessions)
        self._made: deque[tuple[Ids, Any]] = deque()
        self._tokens = 0

    def make(self) -> bool:
        """One more, if there is room. Whether there was, and one was left to make."""
        return self._tokens < AHEAD_TOKENS and self._next()

    def take(self) -> tuple[Ids, Any]:
        """The next one: its prompt and its request."""
        if not self._made:
            self._next()
        prompt, request = self._made.popleft()
        self._tokens -= len(prompt)
        return prompt, request

    def _next(self) -> bool:
        session = next(self._rest, None)
        if session is None:
            return False
        turn = session.turns[0]
        prompt = self._token_ids.prompt(turn.pieces)
        self._made.append((prompt, self._prepare(prompt, turn.output_tokens)))
        self._tokens += len(prompt)
        return True
