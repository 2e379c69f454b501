"""A worker that loses attempts is left alone for a while, is tried again, and is never the last."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonlm.core.routing.failures import (
    FEWEST,
    LONGEST_OPEN_S,
    MAX_IN_A_ROW,
    MOMENT_S,
    OPEN_S,
    TRANSITIONS,
    Breaker,
    Breakers,
    BreakerState,
)

APART_S = 2 * MOMENT_S


def tripped(breaker: Breaker, now: float = 0.0) -> float:
    """Loses until it opens; returns when that was."""
    while breaker.state is BreakerState.CLOSED:
        now += APART_S
        breaker.failure(now)
    return now


def test_it_trips_after_losses_in_a_row() -> None:
    breaker = Breaker()
    for number in range(MAX_IN_A_ROW):
        assert not breaker.refuses(number)
        breaker.failure(float(number))
    assert breaker.refuses(MAX_IN_A_ROW - 1)


def test_what_is_gained_in_between_breaks_the_row() -> None:
    breaker = Breaker()
    for number in range(4 * MAX_IN_A_ROW):
        breaker.failure(float(number)) if number % 3 == 0 else breaker.success(float(number))
        assert breaker.state is BreakerState.CLOSED


def test_a_high_rate_trips_too() -> None:
    """Every second attempt is lost: never several in a row."""
    breaker = Breaker()
    for number in range(FEWEST - 1):
        breaker.failure(float(number)) if number % 2 == 0 else breaker.success(float(number))
    assert not breaker.refuses(FEWEST)
    breaker.failure(FEWEST)
    assert breaker.refuses(FEWEST)


def test_what_is_lost_in_one_moment_counts_once() -> None:
    """A stream that breaks takes its hundred attempts with it."""
    breaker = Breaker()
    for number in range(100):
        breaker.failure(number * MOMENT_S / 100)
    assert breaker.state is BreakerState.CLOSED


def test_one_probe_at_a_time() -> None:
    breaker = Breaker()
    now = tripped(breaker)
    assert breaker.refuses(now + OPEN_S - 0.01)
    now += OPEN_S
    assert not breaker.refuses(now)
    assert breaker.placed()
    assert breaker.refuses(now) and not breaker.placed()
    breaker.left()
    assert not breaker.refuses(now), "a probe that told nothing is followed by another one"
    assert breaker.placed()
    breaker.success(now)
    assert breaker.state is BreakerState.CLOSED
    breaker.left()
    assert breaker.state is BreakerState.CLOSED


def test_each_failed_probe_doubles_the_time_up_to_a_bound() -> None:
    breaker = Breaker()
    now, times = tripped(breaker), []
    for _ in range(8):
        times.append(breaker.open_until - now)
        now = breaker.open_until
        assert not breaker.refuses(now)
        assert breaker.placed()
        breaker.failure(now)
    doubled = [OPEN_S * 2**number for number in range(8)]
    assert times == pytest.approx([min(time, LONGEST_OPEN_S) for time in doubled])


def test_what_still_runs_on_an_open_one_does_not_close_it() -> None:
    breaker = Breaker()
    now = tripped(breaker)
    breaker.success(now)
    assert breaker.refuses(now)


def test_the_table_is_what_the_drawing_says() -> None:
    assert len(TRANSITIONS) == 6
    assert {state for state, _ in TRANSITIONS} == set(BreakerState)


@pytest.mark.parametrize("size", range(1, 8))
def test_at_most_half_of_a_pool_is_ejected(size: int) -> None:
    breakers = Breakers()
    live = [f"w{number}" for number in range(size)]
    for instance_id in live:
        tripped(breakers.of(instance_id))
    assert len(breakers.ejected(live, 1.0)) == size // 2


class Pools(RuleBasedStateMachine):
    """Whatever happens in a pool of any size: half of it is used, and nobody is out for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.breakers = Breakers()
        self.live: list[str] = []
        self.probes: list[str] = []
        self.now = 0.0
        self.names = itertools.count()

    @rule()
    def joins(self) -> None:
        self.live.append(f"w{next(self.names)}")

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        self.live.remove(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), gained=st.booleans())
    def outcome(self, data: st.DataObject, gained: bool) -> None:
        breaker = self.breakers.of(data.draw(st.sampled_from(self.live)))
        (breaker.success if gained else breaker.failure)(self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def placed(self, data: st.DataObject) -> None:
        ejected = self.breakers.ejected(self.live, self.now)
        instance_id = data.draw(st.sampled_from([w for w in self.live if w not in ejected]))
        if self.breakers.of(instance_id).placed():
            self.probes.append(instance_id)

    @precondition(lambda self: self.probes)
    @rule()
    def probe_over(self) -> None:
        self.breakers.of(self.probes.pop()).left()

    @rule(seconds=st.floats(0.0, 2 * LONGEST_OPEN_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def half_is_used(self) -> None:
        ejected = self.breakers.ejected(self.live, self.now)
        assert len(ejected) <= len(self.live) // 2
        later = self.breakers.ejected(self.live, self.now + LONGEST_OPEN_S)
        assert later <= set(self.probes), "only a probe keeps a worker out for longer"


TestPools = Pools.TestCase
