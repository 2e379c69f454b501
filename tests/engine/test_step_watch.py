"""StepWatch: steps in flight run one behind the other, and only the oldest has an age."""

from __future__ import annotations

import pytest

from batonlm.engine.thread import StepWatch


def test_one_step_after_the_other() -> None:
    watch = StepWatch()
    assert watch.age_s(1.0) == 0.0
    watch.submitted(8, 10.0)
    assert watch.age_s(10.5) == 0.5
    assert watch.predicted_s > 0.5, "the first step may take long"
    assert watch.collected(12.0) == 2.0
    assert watch.age_s(99.0) == 0.0
    watch.submitted(8, 100.0)
    assert watch.predicted_s == 2.0


def test_a_step_that_waits_for_another_has_no_age() -> None:
    watch = StepWatch()
    watch.submitted(8, 0.0)
    watch.submitted(64, 1.0)
    assert watch.age_s(3.0) == 3.0
    assert watch.collected(4.0) == 4.0
    assert watch.age_s(4.5) == 0.5
    assert watch.predicted_s == pytest.approx(32.0), "eight times the tokens"
    watch.submitted(8, 4.6)
    assert watch.collected(5.0) == 1.0
    assert watch.predicted_s == 4.0
    # It was submitted late: it began then, not when the one before ended.
    assert watch.collected(7.0) == 2.0
    watch.submitted(8, 20.0)
    assert watch.collected(20.5) == 0.5


def test_planning_has_an_age_as_far_as_nothing_runs() -> None:
    watch = StepWatch()
    watch.planning(1.0)
    assert watch.age_s(3.0) == 2.0 < watch.predicted_s
    watch.planned_none()
    assert watch.age_s(3.0) == 0.0
    watch.planning(4.0)
    watch.submitted(8, 5.0)
    watch.planning(5.5)
    watch.planned_none()
    assert watch.age_s(6.0) == 1.0
    assert watch.collected(7.0) == 2.0


def test_after_the_end_nothing_runs() -> None:
    watch = StepWatch()
    watch.submitted(8, 0.0)
    watch.submitted(8, 0.0)
    watch.stop()
    assert watch.age_s(50.0) == 0.0
