"""EngineLoop: steps in their order, as many in flight as the runner wants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import BlockPool, InvariantBroken
from batonlm.core.scheduler.events import Computed, FirstTokens, Planned
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan, StepResult
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.testing.fake_runner import FakeRunner
from tests.core.attempts import (
    BLOCK_SIZE,
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Outputs,
    attempt,
    decode_loop,
    expected,
    prefill_loop,
    run_out,
)


class Counting(FakeRunner):
    """A runner of some depth that counts what it has in flight."""

    def __init__(self, depth: int):
        super().__init__(64, BLOCK_SIZE, VOCAB_SIZE, MAX_MODEL_LEN, (EOS,), depth=depth)
        self.in_flight = self.most = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)

    def collect(self) -> StepResult:
        self.in_flight -= 1
        return super().collect()


def one_input_a_step(depth: int) -> tuple[EngineLoop, Counting]:
    """Whose steps have room for one input, so that several are planned one behind the other."""
    runner = Counting(depth)
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, BLOCK_SIZE),
        SchedulerPolicy(max_sequences=8, token_budget=16, prefill_budget=8, headroom=8),
        runner.model,
    )
    return EngineLoop(runner, scheduler), runner


def test_a_step_without_work_is_no_step() -> None:
    loop = prefill_loop()
    assert loop.plan(0.0) is None
    assert loop.step(0.0) == []
    loop.idle_check()


def test_events_come_in_the_order_in_which_things_happened() -> None:
    loop = prefill_loop()
    loop.scheduler.add(attempt(), 0.0, keep=False)
    assert [type(event) for event in loop.step(1.0)] == [Planned, Computed, FirstTokens]


def test_the_idle_check_finds_a_leak() -> None:
    loop = decode_loop()
    loop.scheduler.add(attempt(), 0.0)
    loop.step(0.0)
    loop.idle_check()
    (sequence,) = loop.scheduler.sequences.running.values()
    sequence.table = None
    loop.scheduler.sequences.running.clear()
    with pytest.raises(InvariantBroken):
        loop.idle_check()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_the_runner_wants(depth: int) -> None:
    loop, runner = one_input_a_step(depth)
    drawn = [attempt(f"r{i}", size=16, seed=i) for i in range(4)]
    for one in drawn:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(run_out(loop))
    assert [outputs.of(one) for one in drawn] == [expected(one) for one in drawn]
    assert runner.most == depth
    assert loop.in_flight == runner.in_flight == 0


def test_one_step_too_many_is_refused() -> None:
    loop, runner = one_input_a_step(2)
    for i in range(3):
        loop.scheduler.add(attempt(f"r{i}", size=16, seed=i), 0.0)
    for in_flight in (1, 2):
        assert loop.has_room
        plan = loop.plan(0.0)
        assert plan is not None
        loop.submit(plan)
        assert loop.in_flight == in_flight
    assert not loop.has_room
    third = loop.plan(0.0)
    assert third is not None
    with pytest.raises(Internal):
        loop.submit(third)
    assert runner.in_flight == 2


def test_results_come_with_the_plan_they_are_of() -> None:
    loop, _ = one_input_a_step(2)
    plans = []
    for i in range(2):
        loop.scheduler.add(attempt(f"r{i}", size=16, seed=i), 0.0)
        plan = loop.plan(0.0)
        assert plan is not None
        plans.append(plan)
        loop.submit(plan)
    assert [loop.collect()[0] for _ in plans] == plans


def test_a_result_of_another_step_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, runner = one_input_a_step(1)
    collect: Callable[[], StepResult] = runner.collect
    monkeypatch.setattr(runner, "collect", lambda: StepResult(collect().step + 1, ()))
    loop.scheduler.add(attempt(), 0.0)
    with pytest.raises(Internal):
        loop.step(0.0)
