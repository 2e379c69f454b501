"""TokenBucket: never more than rate and burst allow, and nothing is refused for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.admission.tenant_budgets import TokenBucket

AMOUNTS = st.floats(0.1, 30.0)
PAUSES = st.floats(0.0, 5.0)


@given(st.lists(st.tuples(AMOUNTS, PAUSES), min_size=1, max_size=40))
def test_no_more_passes_than_rate_and_burst_and_one_too_large(
    asked: list[tuple[float, float]],
) -> None:
    bucket = TokenBucket(rate=2.0, burst=10.0, now=0.0)
    now, passed = 0.0, 0.0
    for amount, pause in asked:
        now += pause
        if not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            passed += amount
    largest = max(amount for amount, _ in asked)
    assert passed <= 10.0 + 2.0 * now + largest + 1e-6


@given(AMOUNTS, AMOUNTS)
def test_after_the_wait_that_was_told_it_passes(first: float, second: float) -> None:
    bucket = TokenBucket(rate=2.0, burst=10.0, now=0.0)
    bucket.take(first, 0.0)
    wait_s = bucket.wait_s(second, 0.0)
    assert bucket.wait_s(second, wait_s) == pytest.approx(0.0, abs=1e-6)


def test_what_was_not_used_comes_back_but_not_more_than_it_holds() -> None:
    bucket = TokenBucket(rate=1.0, burst=10.0, now=0.0)
    bucket.take(8.0, 0.0)
    bucket.give_back(5.0, 0.0)
    assert bucket.level(0.0) == 7.0
    bucket.give_back(50.0, 0.0)
    assert bucket.is_full(0.0)
    assert bucket.level(0.0) == 10.0


def test_a_clock_that_was_read_earlier_takes_nothing_away() -> None:
    bucket = TokenBucket(rate=1.0, burst=10.0, now=5.0)
    bucket.take(10.0, 5.0)
    assert bucket.level(3.0) == 0.0
    assert bucket.level(6.0) == 1.0


def test_another_size_keeps_what_is_in_it() -> None:
    bucket = TokenBucket(rate=1.0, burst=10.0, now=0.0)
    bucket.take(4.0, 0.0)
    bucket.resize(2.0, 20.0, 0.0)
    assert bucket.level(1.0) == 8.0
    bucket.resize(2.0, 5.0, 1.0)
    assert bucket.level(1.0) == 5.0
