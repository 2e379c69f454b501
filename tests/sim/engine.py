"""An engine without a thread: the real loop, scheduler and runner, stepped by timers.

Takes the place of `batonlm.engine.thread.EngineThread`, whose calls it offers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.core.scheduler.sequence_table import Load
from tests.sim.hosts import Host

T = TypeVar("T")

_Call = tuple[Callable[[EngineLoop], Any], "asyncio.Future[Any] | None"]


class SimEngine:
    """step_s: how long a step takes. Calls wait for the end of the running one."""

    def __init__(
        self,
        host: Host,
        loop: EngineLoop,
        deliver: Callable[[list[Event]], None],
        step_s: float,
    ) -> None:
        self.loop = loop
        self._host = host
        self._deliver = deliver
        self._step_s = step_s
        self._calls: deque[_Call] = deque()
        self._began: float | None = None
        self._due = False
        self._timer: asyncio.TimerHandle | None = None
        host.on_thaw = self._turn

    @property
    def load(self) -> Load:
        load: Load = self.loop.scheduler.load
        return load

    @property
    def step_age_s(self) -> float:
        return 0.0 if self._began is None else self._now() - self._began

    @property
    def step_predicted_s(self) -> float:
        return self._step_s

    async def call(self, function: Callable[[EngineLoop], T]) -> T:
        return await self._enqueue(function)

    async def call_to_end(self, function: Callable[[EngineLoop], T]) -> T:
        return await asyncio.shield(self._enqueue(function))

    async def copy(self, function: Callable[[ModelRunner], object]) -> None:
        await self.call_to_end(lambda loop: function(loop.runner))

    def post(self, function: Callable[[EngineLoop], object]) -> None:
        self._add((function, None))

    def _enqueue(self, function: Callable[[EngineLoop], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._add((function, answer))
        return answer

    def _add(self, call: _Call) -> None:
        self._calls.append(call)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """What the thread does between two steps."""
        self._due = False
        if self._began is not None or not self._host.alive or self._host.frozen:
            return
        while self._calls:
            self._answer(*self._calls.popleft())
        now = self._now()
        plan = self.loop.plan(now)
        self._tell(self.loop.scheduler.take_events())
        if plan is not None:
            self._began = now
            self.loop.submit(plan)
            asyncio.get_running_loop().call_later(self._step_s, self._collect)
        elif (wake := self.loop.scheduler.next_wake(now)) is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(wake, self._turn)

    def _collect(self) -> None:
        if not self._host.alive:
            return
        if self._host.frozen:
            asyncio.get_running_loop().call_later(self._step_s, self._collect)
            return
        self._began = None
        _, result = self.loop.collect()
        self._tell(self.loop.apply(result, self._now()))
        self._turn()

    def _answer(
        self, function: Callable[[EngineLoop], Any], answer: asyncio.Future[Any] | None
    ) -> None:
        try:
            value = function(self.loop)
        except Exception as error:
            if answer is None:
                raise
            if not answer.done():
                answer.set_exception(error)
            return
        if answer is not None and not answer.done():
            answer.set_result(value)

    def _tell(self, events: list[Event]) -> None:
        if events:
            # After the answers to calls that began what they are about.
            asyncio.get_running_loop().call_soon(self._deliver, events)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
