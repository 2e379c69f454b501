"""A thread that copies KV between a pool's memory and KV chunks.

On a CPU a copy may run beside a step: a hand-over's positions are written by nobody once they are
computed, and read by nobody before they are complete. What was pinned or reserved for the copy must
not be given back before `run` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.core.errors import Unavailable

T = TypeVar("T")


async def to_end(running: asyncio.Future[T]) -> T:
    """Awaits work on another thread; a cancellation of ours is raised when it is done.

    For work that uses memory of the waiter's.
    """
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        running.exception()
        raise


class CopyThread:
    """Runs copies one at a time, in the order of calls. Starts its thread with the first one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kv-copy")

    async def run(self, copy: Callable[[], object]) -> None:
        """Raises what the copy raises, and Unavailable when closed. Cancelled, it returns only when
        the copy has ended."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, copy)
        except RuntimeError:
            raise Unavailable("This worker's engine has stopped.") from None
        await to_end(running)

    def close(self) -> None:
        """Waits for the copy that runs. Idempotent."""
        self._thread.shutdown()
