"""Has short and long inputs worked on side by side, on a few threads.

A thread takes several short inputs at once, since handing one over costs more than encoding a
short text. A long input goes alone, and long ones never have all threads: a text that takes seconds
delays its neighbours by no more than their own work. Both kinds are done in the order they came.
There is no timer: whatever waits when a thread is free makes a batch, so a batch is large only
under load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")

LONG_BYTES = 1 << 16
BATCH_BYTES = 1 << 14
BATCH_JOBS = 64


class _Job(NamedTuple):
    work: Callable[[Sequence[Any]], Sequence[Any]]
    item: Any
    size: int
    done: asyncio.Future[Any]


class BatchExecutor:
    """threads: how many the executor has, at least 2 if long inputs are to delay nobody. cores:
    short inputs have no more threads at a time, for on one core two of them only get into each
    other's way. Used on one event loop."""

    def __init__(self, executor: Executor, threads: int, cores: int) -> None:
        self._executor = executor
        self._threads = threads
        self._cores = cores
        self._short: deque[_Job] = deque()
        self._long: deque[_Job] = deque()
        self._running = 0
        self._running_long = 0

    async def run(
        self, work: Callable[[Sequence[Item]], Sequence[Output | Exception]], item: Item, size: int
    ) -> Output:
        """What `work`, called with the item and perhaps others, has for it; raises if that is an
        exception. size: in bytes, or LONG_BYTES for what may take long all the same. An item whose
        caller leaves while it waits is not worked on.
        """
        done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        (self._short if size < LONG_BYTES else self._long).append(_Job(work, item, size, done))
        self._dispatch()
        return await done

    def _dispatch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running < self._threads and (jobs := self._next()):
            long = jobs[0].size >= LONG_BYTES
            self._running += 1
            self._running_long += long
            batch = loop.run_in_executor(self._executor, _work_off, jobs)
            batch.add_done_callback(partial(self._ended, jobs, long))

    def _next(self) -> list[_Job]:
        """Empty when nothing may begin now."""
        for waiting in (self._short, self._long):
            while waiting and waiting[0].done.done():
                waiting.popleft()
        # Short ones go first, but for one long job: so neither kind waits for ever.
        if self._long and (
            not self._running_long or (not self._short and self._running_long < self._threads - 1)
        ):
            return [self._long.popleft()]
        jobs: list[_Job] = []
        free_cores = self._cores - (self._running - self._running_long)
        if free_cores <= 0:
            return jobs
        room = BATCH_BYTES
        # No thread takes what another one is free to do.
        free = min(self._threads - self._running, free_cores)
        share = min(BATCH_JOBS, -(-len(self._short) // free))
        while self._short and len(jobs) < share and (room >= self._short[0].size or not jobs):
            job = self._short.popleft()
            if not job.done.done():
                room -= job.size
                jobs.append(job)
        return jobs

    def _ended(
        self, jobs: Sequence[_Job], long: bool, batch: asyncio.Future[Sequence[Any]]
    ) -> None:
        self._running -= 1
        self._running_long -= long
        if batch.cancelled():
            results: Sequence[Any] = [CancelledError()] * len(jobs)
        elif error := batch.exception():
            results = [error] * len(jobs)
        else:
            results = batch.result()
        for job, result in zip(jobs, results, strict=True):
            if job.done.done():
                continue
            if isinstance(result, BaseException):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)
        self._dispatch()


def _work_off(jobs: Sequence[_Job]) -> Sequence[Any]:
    """On a thread of the executor: a result or an exception for each. The neighbours of one that
    raises all the same share its fate."""
    results: list[Any] = []
    for work, group in groupby(jobs, key=attrgetter("work")):
        results += work([job.item for job in group])
    return results
