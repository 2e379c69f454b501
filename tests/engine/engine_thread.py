"""An EngineThread over the runner without torch, held and broken at will by tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.events import Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.thread import EngineThread
from batonlm.testing.fake_runner import FakeRunner

Engine = EngineThread


class Runner(FakeRunner):
    """Can be held at a step, and can break."""

    def __init__(self, step_seconds: float = 0.0, depth: int = 1):
        super().__init__(64, 16, step_seconds=step_seconds, depth=depth)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.threads: set[int] = set()
        self.breaks = False
        self.closed = False

    def submit(self, plan: StepPlan) -> None:
        self.threads.add(threading.get_ident())
        self.entered.set()
        if not self.gate.wait(30):
            raise TimeoutError
        if self.breaks:
            raise MemoryError("out of device memory")
        super().submit(plan)

    def close(self) -> None:
        self.closed = True
        super().close()


def attempt(name: str = "r", max_tokens: int = 6, remaining_s: float | None = None) -> Attempt:
    return Attempt(
        name,
        0,
        (0,),
        tuple(range(10, 30)),
        20,
        SamplingParams(temperature=0.0),
        StopParams(max_tokens),
        remaining_s=remaining_s,
    )


class Heard:
    """What was delivered, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        self.deliveries = 0

    def take(self, events: list[Event]) -> None:
        self.deliveries += 1
        self.events += events
        self.changed.set()

    @property
    def tokens(self) -> dict[SequenceKey, list[int]]:
        found: dict[SequenceKey, list[int]] = {}
        for event in self.events:
            for made in event.tokens if isinstance(event, NewTokens) else ():
                found.setdefault(made.key, []).extend(made.token_ids)
        return found

    async def until(self, count: int) -> None:
        """Waits until so many tokens were delivered."""
        async with asyncio.timeout(120):
            while sum(map(len, self.tokens.values())) < count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def running(
    runner: Runner,
    heard: Heard,
    *,
    max_queued_calls: int = 1000,
    stop_timeout_s: float = 60.0,
    scheduler: type[Scheduler] = Scheduler,
    policy: SchedulerPolicy | None = None,
) -> AsyncIterator[Engine]:
    def make() -> EngineLoop:
        pool = BlockPool(runner.num_blocks, runner.block_size)
        made = scheduler(pool, policy or SchedulerPolicy(), runner.model)
        return EngineLoop(runner, made)

    engine = Engine(
        make, heard.take, max_queued_calls=max_queued_calls, stop_timeout_s=stop_timeout_s
    )
    await engine.start()
    try:
        yield engine
    finally:
        runner.gate.set()
        await engine.stop()


async def add(engine: Engine, one: Attempt) -> None:
    await engine.call(lambda loop: loop.scheduler.add(one, time.monotonic()))
