"""StepCost: what it learns from steps is what such steps took."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.scheduler.plan import StepWork
from batonlm.core.scheduler.step_cost import StepCost


def truth(work: StepWork) -> float:
    return 0.004 + 0.0003 * work.rows + 2e-7 * work.context + 0.00025 * work.prefill


def taught(*works: StepWork, times: int = 20) -> StepCost:
    cost = StepCost()
    for _ in range(times):
        for work in works:
            cost.observe(work, truth(work))
    return cost


DECODE = (StepWork(1, 100), StepWork(8, 4000), StepWork(32, 9000), StepWork(64, 90000))


def test_nothing_is_known_at_first() -> None:
    cost = StepCost()
    assert cost.predict(StepWork(64, 10000, 512)) == 0.0
    assert cost.prefill_position_s is None
    assert cost.most_prefill(8, 100, 0.01) is None


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 64), st.integers(100, 1000), st.integers(0, 512))
def test_it_predicts_what_it_was_taught(rows: int, each: int, prefill: int) -> None:
    cost = taught(*DECODE, StepWork(8, 4000, 256))
    work = StepWork(rows, rows * each, prefill)
    assert cost.predict(work) == pytest.approx(truth(work), rel=0.05)


def test_a_steady_load_is_predicted_as_it_is() -> None:
    work = StepWork(16, 8000)
    assert taught(work).predict(work) == pytest.approx(truth(work), rel=0.01)


def test_more_work_never_takes_less_whatever_was_measured() -> None:
    cost = StepCost()
    for rows, seconds in ((1, 0.05), (64, 0.01), (8, 0.04), (32, 0.02)) * 10:
        cost.observe(StepWork(rows, rows * 100), seconds)
    times = [cost.predict(StepWork(rows, rows * 100)) for rows in (1, 8, 64, 256)]
    assert times == sorted(times) and times[0] > 0


def test_long_without_prefill_it_still_knows_what_that_costs() -> None:
    cost = taught(*DECODE, StepWork(8, 4000, 256))
    before = cost.prefill_position_s
    for _ in range(500):
        cost.observe(StepWork(16, 8000), truth(StepWork(16, 8000)))
    assert cost.prefill_position_s == before == pytest.approx(0.00025, rel=0.05)


def test_it_follows_when_steps_become_slower() -> None:
    cost = taught(*DECODE)
    work = StepWork(32, 9000)
    for _ in range(600):
        cost.observe(work, 3 * truth(work))
    assert cost.predict(work) == pytest.approx(3 * truth(work), rel=0.1)


def test_the_longest_prefill_within_a_time_keeps_to_it() -> None:
    cost = taught(*DECODE, StepWork(8, 4000, 256))
    most = cost.most_prefill(8, 4000, 0.05)
    assert most is not None and most > 0
    assert cost.predict(StepWork(8, 4000, most)) <= 0.05
    assert cost.predict(StepWork(8, 4000, most + 1)) > 0.05
    assert cost.most_prefill(64, 90000, 0.001) == 0
