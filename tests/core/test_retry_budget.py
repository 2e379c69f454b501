"""Retries are a share of what is started: a fleet that fails is not asked more and more often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.routing.failures import RetryBudget


def test_a_burst_then_a_share() -> None:
    budget = RetryBudget(share=0.1, per_s=0.0, most=5.0)
    assert [budget.take(0.0) for _ in range(6)] == [True] * 5 + [False]
    taken = 0
    for _ in range(1000):
        budget.started()
        taken += budget.take(0.0)
    assert 99 <= taken <= 100


def test_a_quiet_router_may_retry_again_later() -> None:
    budget = RetryBudget(share=0.0, per_s=2.0, most=3.0)
    assert [budget.take(10.0) for _ in range(4)] == [True] * 3 + [False]
    assert [budget.take(11.0) for _ in range(3)] == [True] * 2 + [False]
    assert [budget.take(1000.0) for _ in range(4)] == [True] * 3 + [False]


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.0)), max_size=200))
def test_never_more_than_was_paid_in(events: list[tuple[bool, float]]) -> None:
    budget = RetryBudget(share=0.1, per_s=1.0, most=4.0)
    now, starts, taken = 0.0, 0, 0
    for starting, pause in events:
        now += pause
        if starting:
            starts += 1
            budget.started()
        else:
            taken += budget.take(now)
        assert taken <= 4.0 + 0.1 * starts + now + 1e-6
