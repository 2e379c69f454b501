"""What a client reads of one request: Accepted, deltas, Finished. Knows no wire.

There is no queue: whatever is new since the last event becomes one delta a choice when it is asked
for. A slow reader gets fewer, larger deltas, and so does everyone while the router is too busy to
send each token by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.core.pace import Pace
from baton.core.request import Accepted, Delta, Event, Finished
from baton.router.relay import Relay


class EventStream(AsyncIterator[Event]):
    """Owns the relay's task. `aclose` may be called at any time, and more than once."""

    def __init__(
        self,
        relay: Relay,
        task: asyncio.Task[None],
        accepted: Accepted,
        on_first_token: Callable[[], None],
        pace: Pace,
    ) -> None:
        self._relay = relay
        self._task = task
        self._events: deque[Event] = deque([accepted])
        self._on_first_token = on_first_token
        self._pace = pace
        self._told_at = 0.0
        self._began = False
        self._ended = False

    async def __anext__(self) -> Event:
        """Raises BatonError when the request failed; what came before it has been told."""
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            over = self._task.done()
            if self._collect():
                break
            if over:
                self._ended = True
                self._task.result()
                return self._finished()
            await self._relay.news.wait()
            if self._began and self._pace.interval_s:
                await self._keep_apart()
        return self._events.popleft()

    async def aclose(self) -> None:
        """Ends the request if it still runs; returns when all that it held is given back."""
        self._ended = True
        self._events.clear()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _collect(self) -> bool:
        """Takes what every choice has that was not told yet."""
        deltas: list[Delta] = []
        for text in self._relay.texts.choices:
            delta = text.take_delta()
            if delta is not None:
                deltas.append(delta)
        if deltas:
            self._told_at = asyncio.get_running_loop().time()
            if not self._began:
                self._began = True
                self._on_first_token()
        self._events.extend(deltas)
        return bool(deltas)

    async def _keep_apart(self) -> None:
        """Lets more tokens come for the next event. Neither the first waits nor the last."""
        left = self._told_at + self._pace.interval_s - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.wait((self._task,), timeout=left)

    def _finished(self) -> Finished:
        journey = self._relay.journey
        return Finished(
            prompt_tokens=len(journey.prompt),
            completion_tokens=sum(len(log) for log in journey.logs),
            cached_tokens=self._relay.cached_tokens,
        )
