"""Ends a stream of which one step takes too long, with one timer for all its steps.

A timer for each step would cost as much as what is read or written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

from baton.core.errors import Cancelled
from baton.rpc.awake import Clock

T = TypeVar("T")


class StepLimit:
    """Ends the block that it is entered for, with TimeoutError, when one step within takes
    timeout_s on a clock. When its timer is due, the clock decides."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._cut = asyncio.timeout(None)
        self._since: float | None = None
        """When the step began that is under way."""

    async def __aenter__(self) -> Self:
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
        await self._cut.__aexit__(kind, error, trace)

    async def watch(self, step: Awaitable[T]) -> T:
        """Waits for one step."""
        self._since = self._clock()
        done = await step
        self._since = None
        return done

    def _look(self) -> None:
        """Now, or when the step under way will have taken too long, or one that is still to come
        could have."""
        left = self._timeout_s - (self._clock() - self._since if self._since is not None else 0.0)
        loop = asyncio.get_running_loop()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        else:
            self._cut.reschedule(loop.time())


class WriteTimeout(StepLimit):
    """Ends the block with Cancelled when a client takes nothing for timeout_s."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s, asyncio.get_running_loop().time)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except TimeoutError:
            raise Cancelled("The client took nothing for too long.") from None
