"""Copies run beside a step where the runner allows it, and never past the end of who waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batonlm.core.errors import Unavailable
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan, StepResult
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.thread import CopyThread, EngineThread
from batonlm.testing.fake_runner import FakeRunner
from tests.core.attempts import attempt

PATIENCE_S = 120.0


class HeldRunner(FakeRunner):
    """Stays in its step until it is let go."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__(16, 4)
        self._beside = beside
        self.stepping = threading.Event()
        self.may_step = threading.Event()

    @property
    def copies_beside_steps(self) -> bool:
        return self._beside

    def submit(self, plan: StepPlan) -> None:
        self.stepping.set()
        assert self.may_step.wait(PATIENCE_S)
        super().submit(plan)


async def _started(runner: FakeRunner) -> EngineThread:
    policy = SchedulerPolicy(max_sequences=4, token_budget=64, prefill_budget=32)
    engine = EngineThread(
        lambda: EngineLoop(runner, Scheduler(BlockPool(16, 4), policy, runner.model)),
        lambda events: None,
    )
    await engine.start()
    return engine


async def _stepping(runner: HeldRunner) -> EngineThread:
    engine = await _started(runner)
    await engine.call(lambda loop: loop.scheduler.add(attempt(size=8), 0.0))
    assert await asyncio.to_thread(runner.stepping.wait, PATIENCE_S)
    return engine


async def test_a_copy_does_not_wait_for_the_step() -> None:
    runner = HeldRunner(beside=True)
    engine = await _stepping(runner)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await engine.copy(lambda given: given.pack(((8, 1),), 0, 4, memoryview(bytearray(64))))
    finally:
        runner.may_step.set()
        await engine.stop()


class HeldAhead(FakeRunner):
    """As on a GPU: takes two steps, and is held when one is collected."""

    def __init__(self) -> None:
        super().__init__(16, 4, depth=2)
        self.collecting = threading.Event()
        self.may_collect = threading.Event()

    @property
    def copies_beside_steps(self) -> bool:
        return True

    def collect(self) -> StepResult:
        self.collecting.set()
        assert self.may_collect.wait(PATIENCE_S)
        return super().collect()


async def test_many_copies_are_made_while_steps_are_in_flight() -> None:
    runner = HeldAhead()
    engine = await _started(runner)
    await engine.call(lambda loop: loop.scheduler.add(attempt(size=8), 0.0))
    assert await asyncio.to_thread(runner.collecting.wait, PATIENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(50):
                await engine.copy(
                    lambda given: given.pack(((8, 1),), 0, 4, memoryview(bytearray(64)))
                )
    finally:
        runner.may_collect.set()
        await engine.stop()


async def test_a_copy_waits_for_the_step_where_it_must() -> None:
    runner = HeldRunner(beside=False)
    engine = await _stepping(runner)
    stepping = []
    copying = asyncio.create_task(
        engine.copy(lambda given: stepping.append(not runner.may_step.is_set()))
    )
    await asyncio.sleep(0.02)
    assert not stepping
    runner.may_step.set()
    await copying
    assert stepping == [False]
    await engine.stop()


async def test_copies_are_refused_when_the_engine_has_stopped() -> None:
    runner = HeldRunner(beside=True)
    engine = await _stepping(runner)
    runner.may_step.set()
    await engine.stop()
    with pytest.raises(Unavailable):
        await engine.copy(lambda given: None)


async def test_who_is_cancelled_leaves_when_the_copy_has_ended() -> None:
    copies, began, may_end = CopyThread(), threading.Event(), threading.Event()
    ended = []

    def copy() -> None:
        began.set()
        assert may_end.wait(PATIENCE_S)
        ended.append(True)

    waiting = asyncio.create_task(copies.run(copy))
    assert await asyncio.to_thread(began.wait, PATIENCE_S)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended
    copies.close()


async def test_what_a_copy_raises_comes_out() -> None:
    copies = CopyThread()
    with pytest.raises(ZeroDivisionError):
        await copies.run(lambda: 1 / 0)
    copies.close()
    copies.close()
