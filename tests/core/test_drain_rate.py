"""DrainRate: only what had to wait says how fast a queue is emptied."""

from __future__ import annotations

import pytest

from batonlm.core.admission.fair_queue import DOUBT, DrainRate


def steady(drain: DrainRate, rate: float, seconds: float, start: float = 0.0) -> float:
    drain.waiting(start, rate / 10)
    steps = int(seconds * 10)
    for step in range(1, steps + 1):
        drain.left(rate / 10, start + step / 10)
    return start + steps / 10


def test_nothing_is_said_before_enough_was_seen() -> None:
    drain = DrainRate()
    assert drain.tokens_per_s is None
    assert drain.wait_s(10**6) == 0.0
    steady(drain, 1000, 0.2)
    assert drain.tokens_per_s is None


def test_a_steady_queue_is_measured_and_a_change_is_learnt() -> None:
    drain = DrainRate()
    now = steady(drain, 1000, 20)
    assert drain.tokens_per_s == pytest.approx(1000, rel=0.05)
    assert drain.wait_s(500) == pytest.approx(0.5, rel=0.05)
    steady(drain, 100, 20, now)
    assert drain.tokens_per_s == pytest.approx(100, rel=0.25)


def test_what_is_certain_is_less_than_what_is_foretold() -> None:
    drain = DrainRate()
    assert drain.least_wait_s(10**6) == 0.0
    steady(drain, 1000, 20)
    assert drain.least_wait_s(500) == pytest.approx(drain.wait_s(500) / DOUBT)


def test_time_without_a_queue_does_not_count() -> None:
    drain = DrainRate()
    now = steady(drain, 1000, 10)
    drain.waiting(now, None)
    drain.waiting(now + 1000, 100)
    assert drain.tokens_per_s == pytest.approx(1000, rel=0.05)


def test_standing_still_says_how_long_it_takes_at_least() -> None:
    drain = DrainRate()
    now = steady(drain, 1000, 5)
    drain.waiting(now + 30, 100)
    assert drain.wait_s(1000) > 30
    standing = DrainRate()
    standing.waiting(0.0, 100)
    for second in (1, 2, 4):
        standing.waiting(float(second), 100)
        assert 0.6 * second < standing.wait_s(100) <= second
    assert standing.wait_s(0) == 0.0
