"""Sizes of a pool: bounds and steps, no fight with whoever scales by hand, bounded flapping."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from baton_loadtest.autoscale.decide import HAND_S, PoolPlan, PoolPolicy
from batonlm.core.routing.scaling import Bounds

POLICY = PoolPolicy(Bounds(1, 20), cool_down_s=120.0)


class Pool:
    """A pool that does what it is told."""

    def __init__(self, size: int = 1) -> None:
        self.size, self.now, self.plan = size, 0.0, PoolPlan(POLICY)

    def need(self, workers: int, after_s: float = 5.0) -> int:
        self.now += after_s
        decision = self.plan.decide(self.now, self.size, workers, "so it is")
        if decision.size != self.size:
            self.size = decision.size
            self.plan.done(self.now, self.size)
        return self.size


def test_it_grows_at_once_and_at_most_twofold() -> None:
    pool = Pool()
    assert [pool.need(9) for _ in range(5)] == [2, 4, 8, 9, 9]
    assert Pool(0).need(0) == 1 and Pool(19).need(1000) == 20


def test_it_shrinks_by_a_quarter_after_the_cool_down() -> None:
    pool = Pool(8)
    pool.need(8)
    assert [pool.need(2, 60.0) for _ in range(7)] == [8, 8, 6, 6, 5, 5, 4]


def test_a_planner_that_begins_grows_pools_at_once_and_shrinks_none_within_the_cool_down() -> None:
    """So one that dies, however often, changes nothing but growth."""
    pool = Pool(8)
    for _ in range(20):
        pool.plan = PoolPlan(POLICY)
        assert [pool.need(2, 50.0) for _ in range(3)] == [8, 8, 8]
    pool.plan = PoolPlan(POLICY)
    assert [pool.need(9), pool.need(2, 130.0)] == [9, 7]


def test_a_hand_set_size_stays_for_a_while() -> None:
    pool = Pool(4)
    assert pool.need(4) == 4
    pool.size = 9
    assert pool.need(4) == 9
    assert pool.need(20, HAND_S - 10.0) == 9
    assert pool.need(20, 10.0) == 18
    # Set again while it is kept: for as long again.
    pool.size = 3
    assert pool.need(20) == 3
    pool.size = 2
    assert pool.need(20, HAND_S - 10.0) == 2
    assert pool.need(20, HAND_S - 10.0) == 2


@given(st.lists(st.tuples(st.floats(1.0, 60.0), st.integers(0, 40)), min_size=1, max_size=80))
def test_flapping_is_bounded_whatever_is_needed(steps: list[tuple[float, int]]) -> None:
    pool, changes, needed = Pool(5), [], []
    for passed, need in steps:
        before = pool.size
        pool.need(need, passed)
        needed.append((pool.now, POLICY.bounds.within(need)))
        assert pool.size in range(1, 21)
        if pool.size > before:
            assert pool.size <= min(needed[-1][1], 2 * before)
        if pool.size < before:
            lately = [n for at, n in needed if at >= pool.now - POLICY.cool_down_s]
            assert pool.size >= max(lately)
        if pool.size != before:
            changes.append((pool.now, pool.size > before))
    # No shrink within the cool-down after any change: so few turns are possible.
    for (before_at, _), (at, grew) in pairwise(changes):
        assert grew or at - before_at >= POLICY.cool_down_s
    shrinks = sum(not grew for _, grew in changes)
    assert shrinks <= 1 + ceil(pool.now / POLICY.cool_down_s)
