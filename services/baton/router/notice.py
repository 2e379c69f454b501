"""Wakes everyone who waits for something to change; knows not what changed."""

from __future__ import annotations

import asyncio


class Notice:
    """A broadcast. Check the condition, then wait: nothing is missed, for `set` runs on the same
    loop and there is no await in between.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wakes all current waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns after the next `set`, or after timeout_s."""
        event = self._event
        if timeout_s is None:
            await event.wait()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
