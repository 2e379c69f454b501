"""Cuts a stream whose client takes nothing for too long; knows neither stream nor client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType

from baton.core.errors import Cancelled


class Stall:
    """Ends the block that it is entered for, with Cancelled, when one write within takes timeout_s.

    One timer for all writes of a stream: a timer for each would cost as much as what is written.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clock = asyncio.get_running_loop().time
        self._cut = asyncio.timeout(None)
        self._since: float | None = None
        """When the write began that is under way."""

    async def __aenter__(self) -> Stall:
        await self._cut.__aenter__()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._look)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        try:
            await self._cut.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Cancelled("The client took nothing for too long.") from None

    async def watch(self, write: Awaitable[None]) -> None:
        """Waits for one write."""
        self._since = self._clock()
        await write
        self._since = None

    def _look(self) -> None:
        """Now, or when the write under way will have taken too long, or one that is still to come
        could have."""
        now = self._clock()
        left = self._timeout_s - (now - self._since if self._since is not None else 0.0)
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._cut.reschedule(now)
