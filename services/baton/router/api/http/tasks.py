"""Running work together: side by side, or only for as long as the client stays."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def in_parallel(*work: Coroutine[Any, Any, None]) -> None:
    """All at once. The first failure cancels the others and is raised as itself."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, or cancels it and waits for it as soon as the client is gone.

    The body must have been received before: from then on `receive` only speaks of the end.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
