"""Helpers for calls of grpc.aio: cancelling them for good, telling a call's cancellation from a
task's, and a timeout for each step of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from batonlm.core.errors import Cancelled
from batonlm.rpc.loop import Clock

T = TypeVar("T")

ABANDONED = "The caller left."


async def abandon(call: Any) -> None:
    """Cancels a call of grpc.aio, also one that grpc.aio counts as ended. Idempotent; never waits.

    When a write meets a call that the peer has just ended, grpc.aio marks the call as failed
    ("Internal error from Core") without ending it: `cancel()` then does nothing, and with unread
    responses the task that waits for the status never ends. Only the underlying call can still be
    cancelled, and there is no public way to it. Calls that ended normally are left alone:
    cancelling one blocks the event loop for milliseconds.
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
    """A context manager that ends its block with TimeoutError when one step within takes longer
    than timeout_s on `clock`, which need not be the event loop's.

    One timer watches all steps of the block: a timer for each would cost as much as the read or
    write itself.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._cut = asyncio.timeout(None)
        self._since: float | None = None
        """When the current step began; None between steps."""

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
        """Awaits one step, and returns its result."""
        self._since = self._clock()
        done = await step
        self._since = None
        return done

    def _look(self) -> None:
        """Ends the block if the current step is too long; otherwise sets the timer to the earliest
        time at which this or a later step can be."""
        left = self._timeout_s - (self._clock() - self._since if self._since is not None else 0.0)
        loop = asyncio.get_running_loop()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        else:
            self._cut.reschedule(loop.time())


class WriteTimeout(StepLimit):
    """Ends the block with Cancelled when one write to a client takes longer than timeout_s."""

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
