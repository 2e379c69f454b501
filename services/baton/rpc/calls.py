"""What grpc.aio leaves open about calls: whose cancellation it is, how a call ends for good, and
when one step of a call takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from baton.core.errors import Cancelled
from baton.rpc.loop import Clock

T = TypeVar("T")

ABANDONED = "The caller left."


async def abandon(call: Any) -> None:
    """Cancels a call of grpc.aio, also one that it takes for over already. Idempotent; never waits.

    A write that meets a call which the peer has just ended makes grpc.aio write the call off
    ("Internal error from Core") without ending it: `cancel()` does nothing then, and when answers
    were left unread, the task that waits for the status never ends. Only the call underneath can
    still be cancelled, and there is no public way to it. Calls that ended well are left alone:
    cancelling one of those holds the event loop up for milliseconds.
    """
    if not call.cancel() and await call.code() is grpc.StatusCode.INTERNAL:
        call._cython_call.cancel(ABANDONED)


def cancelled_here() -> bool:
    """Whether the running task itself is cancelled, rather than a call that it waits for.

    grpc.aio raises CancelledError for a call whose status is CANCELLED as well, and that must not
    end the task that made the call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class StepLimit:
    """Ends the block that it is entered for, with TimeoutError, when one step within takes
    timeout_s on a clock. When its timer is due, the clock decides.

    One timer watches all steps of the block: a timer for each step would cost as much as what is
    read or written.
    """

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
