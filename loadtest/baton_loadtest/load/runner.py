"""Sends a workload's requests when they are due, whatever became of those before, and takes their
times.

A request's latency counts from when it was due: what waits in this process, because the process or
the server was busy, is waited for by a user as well (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from baton_loadtest.load.ahead import Ahead
from baton_loadtest.load.samples import ANSWERED, NOT_SENT, UNENDED, Sample
from baton_loadtest.load.token_ids import Ids, TokenIds
from baton_loadtest.load.workload import Session, Turn, Workload

SPARE_S = 0.05
"""To when a request is due, or nothing is begun that might make it late."""


class Client(Protocol):
    """Asks one server. Many calls of `ask` may run at a time, as many as Limits.open says."""

    def prepare(self, ids: Sequence[int], output_tokens: int) -> Any:
        """A request, made before it is due."""

    async def ask(self, request: Any, hear: Callable[[Sequence[int], int], None]) -> str:
        """Sends it and returns its end, as Sample.end has it. hear: told of every token as it
        comes: ids, as far as they are known, and how many."""


@dataclass(frozen=True, slots=True)
class Clock:
    """now: in seconds, growing evenly. spin_s: before it, an event loop's timers are too coarse
    (they count milliseconds), so that the rest is waited for by asking again and again."""

    now: Callable[[], float] = time.perf_counter
    spin_s: float = 0.0015


@dataclass(frozen=True, slots=True)
class Limits:
    """open: requests at a time, at most; those beyond are not sent. request_s: of one request.
    rest_s: from the last arrival to the end of all sessions."""

    open: int = 4096
    request_s: float = 120.0
    rest_s: float = 120.0


@dataclass(slots=True)
class Run:
    """seconds: that arrivals were drawn for. not_asked: turns that came to nothing because the one
    before was not answered in full, or time was up. shortened: as Workload has it. stopped: before
    its end. most_open: requests at a time."""

    samples: list[Sample]
    seconds: float
    not_asked: int = 0
    shortened: int = 0
    stopped: bool = False
    most_open: int = 0


class Runner:
    """show: told how many requests are due, open and ended, whenever one is due or ends."""

    def __init__(
        self,
        client: Client,
        token_ids: TokenIds,
        limits: Limits,
        clock: Clock | None = None,
        show: Callable[[Run, int], None] = lambda run, num_open: None,
    ) -> None:
        self._client, self._token_ids, self._limits = client, token_ids, limits
        self._clock = clock or Clock()
        self._show = show
        self._open = 0
        self._began = 0.0
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    def stop(self) -> None:
        """Nothing more is sent, and what is open is not waited for."""
        self._stopping.set()

    async def run(self, workload: Workload) -> Run:
        """Ends rest_s after the last arrival at the latest."""
        run = Run([], workload.seconds, shortened=workload.shortened)
        ahead = Ahead(self._client.prepare, self._token_ids, workload)
        await self._make(ahead, math.inf)
        turns = 0
        self._began = self._clock.now()
        try:
            for session in workload.sessions:
                # What is left of the time until then is spent on those that follow.
                await self._make(ahead, session.due_s - SPARE_S)
                await self._until(session.due_s)
                if self._stopping.is_set():
                    break
                turns += len(session.turns)
                task = asyncio.create_task(self._session(run, session, *ahead.take()))
                self._running.add(task)
                task.add_done_callback(self._ended)
            await self._rest()
        finally:
            left = list(self._running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._fault is not None:
            raise self._fault
        run.not_asked = turns - len(run.samples)
        run.stopped = self._stopping.is_set()
        return run

    async def _make(self, ahead: Ahead, until_s: float) -> None:
        """Requests that follow, as long as there is time, and room for them. Others run between
        one and the next."""
        while self._now() < until_s and not self._stopping.is_set():
            if not ahead.make():
                return
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = self._fault or fault
            self._stopping.set()

    async def _rest(self) -> None:
        if not self._running:
            return
        ends = [
            asyncio.ensure_future(asyncio.wait(self._running)),
            asyncio.ensure_future(self._stopping.wait()),
        ]
        timeout = self._limits.rest_s
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _session(self, run: Run, session: Session, prompt: Ids, request: Any) -> None:
        last = len(session.turns) - 1
        due_s = session.due_s
        for index, turn in enumerate(session.turns):
            if index:
                due_s = self._now() + turn.pause_s
                prompt = prompt + self._token_ids.prompt(turn.pieces)
                request = self._client.prepare(prompt, turn.output_tokens)
                await self._until(due_s)
            sample = Sample(due_s, len(prompt), index)
            run.samples.append(sample)
            await self._ask(run, sample, turn, request, index < last)
            if sample.end != ANSWERED:
                return
            prompt = prompt + array("q", sample.ids)
            sample.ids = []

    async def _ask(
        self, run: Run, sample: Sample, turn: Turn, request: Any, keeps_ids: bool
    ) -> None:
        if self._open >= self._limits.open:
            sample.end = NOT_SENT
            self._show(run, self._open)
            return

        def hear(ids: Sequence[int], count: int) -> None:
            sample.hear(self._now(), count)
            if keeps_ids:
                sample.ids.extend(ids)

        self._open += 1
        run.most_open = max(run.most_open, self._open)
        sample.left_s = self._now()
        try:
            async with asyncio.timeout(self._limits.request_s):
                sample.end = await self._client.ask(request, hear)
        except TimeoutError:
            sample.end = "timed out"
        except asyncio.CancelledError:
            sample.end = UNENDED
            raise
        finally:
            sample.ended_s = self._now()
            self._open -= 1
            self._show(run, self._open)
        if sample.end == ANSWERED and not sample.tokens:
            sample.end = "no token"

    async def _until(self, due_s: float) -> None:
        """Lets others run at least once, however late it is."""
        wait_s = due_s - self._now() - self._clock.spin_s
        if wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()
        await asyncio.sleep(0)
        # It is the clock that is waited for, so no event would tell.
        while self._clock.spin_s and self._now() < due_s and not self._stopping.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _now(self) -> float:
        return self._clock.now() - self._began
