"""EngineThread over the runner without torch: order, wake-ups, failures and the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from batonlm.core.errors import Internal, NotFound, Overloaded, Unavailable
from batonlm.core.scheduler.events import AttemptFailed
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.thread import EngineThread
from tests.engine.engine_thread import Engine, Heard, Runner, add, attempt, running


async def test_tokens_are_delivered_step_by_step_from_one_thread() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        await add(engine, attempt("a"))
        await add(engine, attempt("b"))
        await heard.until(12)
        a, b = heard.tokens.values()
        assert len(a) == 6 and a == b
        assert runner.threads.isdisjoint({threading.get_ident()}) and len(runner.threads) == 1
        assert await engine.call(lambda loop: loop.scheduler.has_work) is False
    assert runner.closed


async def test_who_left_while_it_starts_is_not_told_how_that_ended() -> None:
    troubles: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: troubles.append(trouble))
    making, go_on = threading.Event(), threading.Event()

    def make_loop() -> EngineLoop:
        making.set()
        go_on.wait(30)
        raise Internal("it cannot be made")

    engine = EngineThread(make_loop, lambda events: None)
    starting = asyncio.ensure_future(engine.start())
    assert await asyncio.to_thread(making.wait, 30)
    starting.cancel()
    await asyncio.wait([starting])
    go_on.set()
    await engine.stop()
    await asyncio.sleep(0)
    assert starting.cancelled() and troubles == []


async def test_its_load_is_up_to_date_after_every_call() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        assert engine.load.free_blocks == 64
        one = attempt()
        await engine.call(lambda loop: loop.scheduler.reserve(one, time.monotonic()))
        assert (engine.load.running_sequences, engine.load.free_blocks) == (1, 62)
        await engine.call(lambda loop: loop.scheduler.cancel(one.key))
        assert (engine.load.running_sequences, engine.load.free_blocks) == (0, 64)


async def test_calls_run_in_order_between_steps_and_on_the_engine_thread() -> None:
    runner, heard, order = Runner(), Heard(), []
    async with running(runner, heard) as engine:
        runner.gate.clear()
        await add(engine, attempt())
        assert await asyncio.to_thread(runner.entered.wait, 30)
        for number in range(3):
            engine.post(lambda loop, n=number: order.append((n, threading.get_ident())))  # type: ignore[misc]
        answer = asyncio.ensure_future(engine.call(lambda loop: len(order)))
        await asyncio.sleep(0)
        assert order == [], "a step is running"
        runner.gate.set()
        assert await answer == 3
        assert [number for number, _ in order] == [0, 1, 2]
        assert {thread for _, thread in order} == runner.threads


async def test_what_a_call_raises_reaches_its_caller_and_nobody_else() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        with pytest.raises(NotFound):
            await engine.call(lambda loop: loop.scheduler.extents(attempt().key))
        engine.post(lambda loop: loop.scheduler.extents(attempt().key))
        await add(engine, attempt())
        await heard.until(6)


async def test_a_cancelled_call_still_runs() -> None:
    runner, heard, ran = Runner(), Heard(), threading.Event()
    async with running(runner, heard) as engine:
        runner.gate.clear()
        await add(engine, attempt())
        assert await asyncio.to_thread(runner.entered.wait, 30)
        caller = asyncio.ensure_future(engine.call(lambda loop: ran.set()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        runner.gate.set()
        assert await asyncio.to_thread(ran.wait, 30)


async def test_call_to_end_leaves_only_when_the_function_is_done() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        began, go_on, done = threading.Event(), threading.Event(), threading.Event()

        def use_memory(loop: EngineLoop) -> None:
            began.set()
            go_on.wait(30)
            done.set()
            raise Internal("it also failed")

        caller = asyncio.ensure_future(engine.call_to_end(use_memory))
        assert await asyncio.to_thread(began.wait, 30)
        for _ in range(3):
            caller.cancel()
            await asyncio.sleep(0)
            assert not caller.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done.is_set()
        assert await engine.call_to_end(lambda loop: 7) == 7


async def test_a_cancel_frees_within_one_step() -> None:
    runner, heard = Runner(step_seconds=0.005), Heard()
    async with running(runner, heard) as engine:
        one = attempt(max_tokens=500)
        await add(engine, one)
        await heard.until(3)
        engine.post(lambda loop: loop.scheduler.cancel(one.key))
        load = await engine.call(lambda loop: loop.scheduler.load)
        assert (load.running_sequences, load.free_blocks) == (0, 64)


async def test_it_wakes_by_itself_for_a_deadline() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:

        def wait_for_blocks(loop: EngineLoop) -> None:
            number, now = 0, time.monotonic()
            while loop.scheduler.reserve(attempt(f"r{number}", 900), now) is not None:
                number += 1
            loop.scheduler.add(attempt("late", 900, remaining_s=0.05), now)

        await engine.call(wait_for_blocks)
        async with asyncio.timeout(120):
            while not any(isinstance(event, AttemptFailed) for event in heard.events):
                heard.changed.clear()
                await heard.changed.wait()


async def test_an_idle_engine_sleeps() -> None:
    runner, heard, planned = Runner(), Heard(), 0

    class Counting(Scheduler):
        def plan(self, now: float) -> StepPlan | None:
            nonlocal planned
            planned += 1
            return super().plan(now)

    async with running(runner, heard, scheduler=Counting) as engine:
        await add(engine, attempt())
        await heard.until(6)
        assert await engine.call(lambda loop: loop.scheduler.has_work) is False
        # The call's own round through the loop may still be on its way to sleep.
        for _ in range(10):
            before = planned
            await asyncio.sleep(0.2)
            if planned == before:
                break
        assert planned == before


async def test_the_age_of_a_step_is_seen_while_it_runs() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        assert engine.step_age_s == 0.0
        runner.gate.clear()
        await add(engine, attempt())
        assert await asyncio.to_thread(runner.entered.wait, 30)
        first = engine.step_age_s
        await asyncio.sleep(0.01)
        assert engine.step_age_s > first
        assert engine.step_predicted_s > 0.0
        runner.gate.set()
        await heard.until(6)
        await engine.call(lambda loop: None)
        assert engine.step_age_s == 0.0


async def test_too_many_calls_are_refused_but_nothing_that_gives_back() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard, max_queued_calls=5) as engine:
        runner.gate.clear()
        await add(engine, attempt())
        assert await asyncio.to_thread(runner.entered.wait, 30)
        queued = [asyncio.ensure_future(engine.call(lambda loop: None)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await engine.call(lambda loop: None)
        given_back: list[EngineLoop] = []
        engine.post(given_back.append)
        runner.gate.set()
        await asyncio.gather(*queued)
        await engine.call(lambda loop: None)
        assert len(given_back) == 1


async def test_a_broken_runner_is_fatal() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        runner.gate.clear()
        runner.breaks = True
        await add(engine, attempt())
        assert await asyncio.to_thread(runner.entered.wait, 30)
        queued = asyncio.ensure_future(engine.call(lambda loop: None))
        await asyncio.sleep(0)
        assert not engine.failed.done()
        runner.gate.set()
        async with asyncio.timeout(120):
            assert isinstance(await engine.failed, MemoryError)
            with pytest.raises(Unavailable):
                await queued
        with pytest.raises(Unavailable):
            await engine.call(lambda loop: None)
        assert engine.step_age_s == 0.0


async def test_a_loop_that_cannot_be_made_fails_the_start() -> None:
    def make() -> EngineLoop:
        raise FileNotFoundError("no weights")

    engine = Engine(make, Heard().take)
    await engine.stop()
    with pytest.raises(FileNotFoundError):
        await engine.start()
    await engine.stop()


async def test_stop_ends_the_running_step_and_refuses_the_rest() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard) as engine:
        runner.gate.clear()
        await add(engine, attempt(max_tokens=500))
        assert await asyncio.to_thread(runner.entered.wait, 30)
        queued = asyncio.ensure_future(engine.call(lambda loop: None))
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        runner.gate.set()
        await stopping
        assert runner.closed and not engine.failed.done()
        with pytest.raises(Unavailable):
            await queued
        await engine.stop()


async def test_a_step_that_never_returns_does_not_hold_the_process() -> None:
    runner, heard = Runner(), Heard()
    async with running(runner, heard, stop_timeout_s=0.1) as engine:
        runner.gate.clear()
        await add(engine, attempt(max_tokens=500))
        assert await asyncio.to_thread(runner.entered.wait, 30)
        await engine.stop()
        assert not runner.closed


def test_it_loads_without_torch() -> None:
    code = "import sys, batonlm.engine.thread; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
