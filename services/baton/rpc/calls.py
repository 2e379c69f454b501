"""Ending a streaming call for good, whatever became of it."""

from __future__ import annotations

from typing import Any

import grpc

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
