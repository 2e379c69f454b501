"""StepTimes: guesses that are never too short for what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.scheduler.step_cost import StepTimes


def test_before_anything_is_known_it_is_patient() -> None:
    assert StepTimes(7.0).predict(1) == 7.0


@given(st.lists(st.floats(0.001, 10.0), min_size=1))
def test_it_is_at_least_the_last_step(seconds: list[float]) -> None:
    times = StepTimes()
    for one in seconds:
        times.observe(100, one)
        assert times.predict(100) >= one
        assert times.predict(100) <= max(seconds)


def test_one_slow_step_is_forgotten_slowly() -> None:
    times = StepTimes()
    times.observe(64, 1.0)
    for _ in range(10):
        times.observe(64, 0.1)
    assert 0.5 < times.predict(64) < 1.0
    for _ in range(200):
        times.observe(64, 0.1)
    assert times.predict(64) == pytest.approx(0.1, rel=0.01)


def test_unknown_sizes_borrow_pessimistically() -> None:
    times = StepTimes()
    times.observe(16, 0.2)
    assert times.predict(1) == 0.2
    assert times.predict(64) == pytest.approx(0.8)
    times.observe(256, 5.0)
    assert times.predict(64) == 5.0
