"""Drafts are computed where they pay, whatever steps take and however often drafts are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest

from batonlm.core.scheduler.drafts import MOST_DRAFTS
from batonlm.core.scheduler.plan import StepWork
from tests.core.drafted_work import RandomDrafter, Work

Seconds = Callable[[StepWork], float]


def weights(work: StepWork) -> float:
    """A GPU: a step reads all weights, and a position more costs next to nothing."""
    return 0.010 + 0.0001 * work.rows + 2e-7 * work.context + 0.0003 * work.drafts


def rows(work: StepWork) -> float:
    """A core: a position more soon takes as long as a row more."""
    return 0.018 + 0.0014 * work.rows + 1e-7 * work.context + 0.0016 * work.drafts


def tiles(work: StepWork) -> float:
    """Positions are computed sixteen at a time, full or not."""
    return 0.001 + 0.008 * -(-(work.rows + work.drafts) // 16)


COSTS = {"weights": weights, "rows": rows, "tiles": tiles}


def disturbed(cost: Seconds, seed: int, *, phases: bool = False) -> Seconds:
    """Times vary by a tenth, and one step in thirty is slowed down to a third by others. phases:
    now and then they slow down all steps for a while."""
    numbers = random.Random(seed)
    slow, left = 1.0, 0

    def seconds(work: StepWork) -> float:
        nonlocal slow, left
        left -= 1
        if phases and left < 0:
            slow, left = numbers.choice((1.0, 1.0, 1.4)), numbers.randint(20, 100)
        took_s = slow * cost(work) * max(0.3, numbers.gauss(1.0, 0.1))
        return took_s if numbers.random() > 1 / 30 else 3 * took_s

    return seconds


def gain(work: Work, cost: Seconds, steps: int) -> float:
    """Runs so many steps. Returns the time that their tokens would have taken without drafts, as
    part of what they took; of both what is not for others to change."""
    before = work.made[-1]
    works = work.run(steps)
    row_s = sum(cost(one._replace(drafts=0)) / one.rows for one in works) / steps
    return (work.made[-1] - before) * row_s / sum(map(cost, works))


def best(work: StepWork, cost: Seconds, right: float) -> float:
    """The gain of who knows what a step takes, and drafts as many tokens for each sequence."""
    alone_s = cost(work)
    gains = [1.0]
    made = 1.0
    for drafts in range(1, MOST_DRAFTS + 1):
        made += right**drafts
        gains.append(made * alone_s / cost(work._replace(drafts=drafts * work.rows)))
    return max(gains)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize(
    "num_rows", [1, 4, *(pytest.param(many, marks=pytest.mark.deep) for many in (16, 32))]
)
def test_drafts_of_known_odds_gain_most_of_what_there_is_to_gain(
    cost: Seconds, num_rows: int
) -> None:
    for right in (0.9, 0.6, 0.3):
        work = Work(num_rows, disturbed(cost, num_rows), RandomDrafter(right))
        work.run(100)
        steps = 400
        gained = gain(work, cost, steps)
        possible = best(work.works[-steps // 2]._replace(drafts=0), cost, right)
        assert gained >= 0.97
        # Where the next tile begins is not known, and a gain of a tenth is hard to tell from noise.
        part = 0.4 if cost is tiles else 0.8
        assert gained - 1.0 >= part * (possible - 1.0) - 0.15, (right, gained, possible)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_drafts_that_are_rarely_right_lose_little(cost: Seconds) -> None:
    first, later = [], []
    # Their odds are given as they are, somewhat too high, and far too high.
    for right, confidence in ((0.3, 1.0), (0.3, 1.5), (0.1, 3.0)):
        for seed in range(3):
            drafter = RandomDrafter(right, confidence, seed)
            work = Work(2, disturbed(cost, seed), drafter)
            first.append(gain(work, cost, 100))
            later.append(gain(work, cost, 300))
    # Single ones may have had their first steps slowed down by others.
    assert mean(first) >= 0.95 and min(first) >= 0.75
    assert mean(later) >= 0.97 and min(later) >= 0.85


def test_they_end_when_they_are_not_right_any_more_and_come_back_when_they_are() -> None:
    drafter = RandomDrafter(0.8)
    work = Work(4, disturbed(rows, 3), drafter)
    assert gain(work, rows, 200) >= 1.25
    # The odds go on to be given as before: only the result shows it.
    drafter.right, drafter.confidence = 0.05, 16.0
    assert gain(work, rows, 400) >= 0.95
    assert sum(one.drafts for one in work.works[-100:]) < 100
    drafter.right, drafter.confidence = 0.8, 1.0
    work.run(100)
    assert gain(work, rows, 200) >= 1.25


def test_they_end_where_they_cost_more_than_they_are_worth_and_come_back() -> None:
    price_s = 0.002
    work = Work(16, lambda one: 0.001 + 0.002 * one.rows + price_s * one.drafts, RandomDrafter(0.7))
    assert any(one.drafts for one in work.run(10))
    assert sum(one.drafts for one in work.run(100)) <= 3 * 16
    price_s = 0.0001
    work.run(100)
    assert sum(one.drafts > 0 for one in work.run(20)) >= 18


def test_as_many_as_are_worth_what_they_take() -> None:
    work = Work(1, lambda one: 0.010 + 0.0002 * one.drafts, RandomDrafter(0.6))
    work.run(60)
    # 0.6, 0.36, 0.22, 0.13, 0.08: until a fiftieth of a step.
    assert all(3 <= one.drafts <= 6 for one in work.run(20) if one.drafts)
    assert sum(one.drafts > 0 for one in work.works[-20:]) >= 18


def test_drafts_of_low_odds_are_not_computed_in_a_large_batch() -> None:
    work = Work(32, lambda one: 0.004 + 0.001 * (one.rows + one.drafts), RandomDrafter(0.3))
    assert any(one.drafts for one in work.run(16))
    assert not any(one.drafts for one in work.run(40))


def test_steps_slowed_down_for_a_while_do_not_end_drafts_for_long() -> None:
    work = Work(1, disturbed(weights, 5, phases=True), RandomDrafter(0.9))
    assert gain(work, weights, 600) >= 4.0


def test_a_step_stays_below_its_target() -> None:
    def seconds(one: StepWork) -> float:
        return 0.002 + 0.0005 * (one.rows + one.drafts)

    work = Work(4, seconds, RandomDrafter(0.95), target_step_s=0.006)
    work.run(20)
    late = work.run(40)
    assert all(seconds(one) <= 0.006 for one in late)
    assert sum(one.drafts > 0 for one in late) >= 30
