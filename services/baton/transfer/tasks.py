"""Ways to wait for work that leave none of it behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def race(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first one ends, then cancels the others and waits for them.

    Raises what the first one raised (when several failed together: the first in order).
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await outlast(tasks)
    for task in ended:
        task.result()


async def outlast(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Waits until all tasks have ended, whatever they raise and however often we are cancelled.

    For work that must not be left alone because it touches memory that is about to be given back.
    A cancellation that came meanwhile is raised afterwards.
    """
    pending, cancelled = set(tasks), False
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
            pending = {task for task in pending if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if cancelled:
        raise asyncio.CancelledError


async def to_end(work: Awaitable[T]) -> T:
    """Awaits work that must not be interrupted; a cancellation of ours is raised after its end."""
    task = asyncio.ensure_future(work)
    await outlast([task])
    return task.result()
