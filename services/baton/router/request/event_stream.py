"""What a client reads of one request: Accepted, deltas, Finished.

There is no queue: whatever is new since the last event becomes one delta a choice when it is asked
for. A slow reader gets fewer, larger deltas, and so does everyone while the router is too busy to
send each token by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from baton.core.errors import BatonError, Unavailable
from baton.core.request.answer_deltas import AnswerDeltas
from baton.core.request.request import Accepted, Event
from baton.router.request.runner import RequestRunner


def left() -> BatonError:
    """What a request ends with, or is refused with, because its router leaves."""
    return Unavailable("This router is leaving.", retry_after_s=1.0)


class EventStream(AsyncIterator[Event]):
    """Owns the runner's task. parts: what each choice's deltas are put through; empty: nothing.
    `aclose` may be called at any time, and more than once."""

    def __init__(
        self,
        runner: RequestRunner,
        task: asyncio.Task[None],
        accepted: Accepted,
        on_first_token: Callable[[], None],
        parts: Sequence[AnswerDeltas] = (),
    ) -> None:
        self._runner = runner
        self._task = task
        self._events: deque[Event] = deque([accepted])
        self._on_first_token = on_first_token
        self._parts = parts
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
                self._raise_failure()
                reasoning_tokens = sum(part.reasoning_tokens for part in self._parts)
                return self._runner.finished(reasoning_tokens)
            await self._runner.news.wait()
            early_s = self._runner.asking.early_s
            if early_s > 0:
                # Lets more tokens come for the next event; the end of an answer does not wait.
                await asyncio.wait((self._task,), timeout=early_s)
        return self._events.popleft()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt found in a prefix cache, known with its first
        token."""
        return self._runner.cached_tokens

    def call_off(self) -> None:
        """Ends the request if it still runs: what is there is told, and then Cancelled raised."""
        self._runner.cancel()

    async def aclose(self) -> None:
        """Ends the request if it still runs; returns when all that it held is given back."""
        self._ended = True
        self._events.clear()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _raise_failure(self) -> None:
        """Of a task that is over."""
        if self._task.cancelled():
            # By the router, which closes: whoever reads ends its request by `aclose`.
            error = left()
            error.request_id = self._runner.request_state.request_id
            raise error
        try:
            self._task.result()
        except BatonError as error:
            error.request_id = self._runner.request_state.request_id
            raise

    def _collect(self) -> bool:
        """Takes what every choice has that was not told yet."""
        for text in self._runner.texts.choices:
            delta = text.take_delta()
            if delta is not None:
                parts = self._parts
                self._events.append(parts[delta.choice].of(delta) if parts else delta)
        if not self._events:
            return False
        self._runner.asking.told()
        if not self._began:
            self._began = True
            self._on_first_token()
        return True
