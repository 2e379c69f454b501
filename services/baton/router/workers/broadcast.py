"""Wakes everyone who waits for something to change."""

from __future__ import annotations

import asyncio


class Broadcast:
    """A broadcast. Check the condition, then wait: nothing is missed, for `set` runs on the same
    loop and there is no await in between. Without anyone who waits, `set` costs nothing: streams
    are told of every token.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def set(self) -> None:
        """Wakes all current pending attempts."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for pending_attempt in waiting:
                if not pending_attempt.done():
                    pending_attempt.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns after the next `set`, or after timeout_s."""
        if timeout_s is None:
            await self._next()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._next()
        except TimeoutError:
            pass

    async def _next(self) -> None:
        pending_attempt = asyncio.get_running_loop().create_future()
        self._waiting[pending_attempt] = None
        try:
            await pending_attempt
        finally:
            self._waiting.pop(pending_attempt, None)
