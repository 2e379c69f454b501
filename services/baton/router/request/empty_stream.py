"""A request's events where all of them are known at once: nothing of it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from baton.core.request.request import Accepted, Delta, Event, Finished, FinishReason


class EmptyStream(AsyncIterator[Event]):
    """Of a request that generates nothing: every choice has reached its length."""

    cached_tokens: Final = 0

    def __init__(self, accepted: Accepted, n: int) -> None:
        ends = [Delta(choice, finish_reason=FinishReason.LENGTH) for choice in range(n)]
        finished = Finished(accepted.prompt_tokens, 0, 0)
        self._events: deque[Event] = deque((accepted, *ends, finished))

    async def __anext__(self) -> Event:
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    def call_off(self) -> None:
        """Nothing runs that could be."""

    async def aclose(self) -> None:
        self._events.clear()
