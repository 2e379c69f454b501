"""EngineThread with a runner that takes the next step while one runs."""

from __future__ import annotations

import asyncio
import time

from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan, StepResult
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.testing.fake_runner import FakeRunner
from tests.engine.engine_thread import Engine, Heard, Runner, attempt, running


class Ahead(Runner):
    """Takes two steps, and is held or breaks when one is collected."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.submitted = self.collected = 0

    def submit(self, plan: StepPlan) -> None:
        FakeRunner.submit(self, plan)
        self.submitted += 1

    def collect(self) -> StepResult:
        self.entered.set()
        if not self.gate.wait(30):
            raise TimeoutError
        if self.breaks:
            raise MemoryError("out of device memory")
        result = super().collect()
        self.collected += 1
        return result


ONE_INPUT_A_STEP = SchedulerPolicy(max_sequences=4, token_budget=20, prefill_budget=16)


async def add_together(engine: Engine, *names: str) -> None:
    def add_all(loop: EngineLoop) -> None:
        for name in names:
            loop.scheduler.add(attempt(name), time.monotonic())

    await engine.call(add_all)


async def test_the_next_step_is_submitted_before_one_is_collected() -> None:
    runner, heard = Ahead(), Heard()
    async with running(runner, heard, policy=ONE_INPUT_A_STEP) as engine:
        runner.gate.clear()
        await add_together(engine, "a", "b", "c")
        assert await asyncio.to_thread(runner.entered.wait, 30)
        assert (runner.submitted, runner.collected) == (2, 0)
        assert engine.load.waiting_sequences == 1
        runner.gate.set()
        await heard.until(18)
        a, b, c = heard.tokens.values()
        assert len(a) == 6 and a == b == c
        assert await engine.call(lambda loop: loop.in_flight) == 0
        assert runner.submitted == runner.collected


async def test_stop_ends_and_tells_all_steps_in_flight() -> None:
    runner, heard = Ahead(), Heard()
    async with running(runner, heard, policy=ONE_INPUT_A_STEP) as engine:
        runner.gate.clear()
        await add_together(engine, "a", "b", "c")
        assert await asyncio.to_thread(runner.entered.wait, 30)
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        runner.gate.set()
        await stopping
        assert runner.closed and not engine.failed.done()
        assert runner.submitted == runner.collected == 2
        await heard.until(2)
        assert [len(tokens) for tokens in heard.tokens.values()] == [2]


async def test_a_runner_that_breaks_is_closed_with_its_steps_in_flight() -> None:
    runner, heard = Ahead(), Heard()
    async with running(runner, heard, policy=ONE_INPUT_A_STEP) as engine:
        runner.breaks = True
        await add_together(engine, "a", "b")
        async with asyncio.timeout(120):
            assert isinstance(await engine.failed, MemoryError)
        await engine.stop()
        assert runner.closed and runner.submitted == 2
        assert engine.step_age_s == 0.0
        assert heard.tokens == {}


async def test_steps_are_observed_in_order_with_the_time_they_ran() -> None:
    runner, heard, observed, told = Ahead(), Heard(), [], []

    class Observing(Scheduler):
        def observe(self, plan: StepPlan, seconds: float) -> None:
            observed.append((plan.step, seconds))
            super().observe(plan, seconds)

        def apply(self, result: StepResult, now: float) -> list[Event]:
            told.append(result.step)
            assert len(observed) == len(told)
            return super().apply(result, now)

    async with running(runner, heard, policy=ONE_INPUT_A_STEP, scheduler=Observing) as engine:
        await add_together(engine, "a", "b")
        await heard.until(12)
        await engine.call(lambda loop: None)
        assert [step for step, _ in observed] == told == list(range(1, runner.submitted + 1))
        assert all(seconds >= 0.0 for _, seconds in observed)
