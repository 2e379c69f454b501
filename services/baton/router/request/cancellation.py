"""Tells one's own cancellation from a peer's."""

from __future__ import annotations

import asyncio


def cancelled_here() -> bool:
    """Whether the running task itself was asked to end.

    grpc.aio raises CancelledError for a call whose status is CANCELLED as well, and that must not
    end the task that made the call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
