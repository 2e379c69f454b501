"""When requests are due."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest.load.scenario import Arrivals, Kind, replayed
from batonlm.core.errors import InvalidArgument

RATES = st.floats(0.5, 50)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrivals:
    period_s = draw(st.floats(0.5, 20))
    return Arrivals(
        draw(st.sampled_from(Kind)),
        draw(RATES),
        draw(st.floats(1, 60)),
        to_rate=draw(RATES),
        burst_rate=draw(RATES),
        period_s=period_s,
        burst_s=draw(st.floats(0.1, 1)) * period_s,
    )


@settings(max_examples=25)
@given(arrivals(), st.integers())
def test_times_are_in_order_within_the_time_and_of_the_seed(spec: Arrivals, seed: int) -> None:
    times = spec.times(random.Random(seed))
    assert times == sorted(times) == spec.times(random.Random(seed))
    assert all(0 <= at < spec.seconds for at in times)


@settings(max_examples=10)
@given(arrivals(), st.floats(0.1, 10))
def test_the_mean_rate_is_that_of_the_curve_and_scales(spec: Arrivals, factor: float) -> None:
    points = 40_000
    curve = sum(spec.rate_at((n + 0.5) * spec.seconds / points) for n in range(points)) / points
    assert curve == pytest.approx(spec.mean_rate, rel=0.05)
    assert spec.scaled(factor).mean_rate == pytest.approx(factor * spec.mean_rate)


@pytest.mark.parametrize("kind", Kind)
def test_as_many_arrive_as_the_rate_says(kind: Kind) -> None:
    spec = Arrivals(kind, 20, 2000, to_rate=60, burst_rate=80, burst_s=5, period_s=20)
    times = spec.times(random.Random(7))
    expected = spec.mean_rate * spec.seconds
    # Five standard deviations of a Poisson count.
    assert abs(len(times) - expected) < 5 * expected**0.5
    if kind is Kind.RAMP:
        late = sum(at >= 1000 for at in times)
        assert late / len(times) == pytest.approx(50 / 80, abs=0.02)
    if kind is Kind.BURSTS:
        inside = sum(at % 20 < 5 for at in times)
        assert inside / len(times) == pytest.approx(400 / 700, abs=0.02)


def test_constant_arrivals_are_evenly_apart() -> None:
    assert Arrivals(Kind.CONSTANT, 4, 1).times(random.Random()) == [0, 0.25, 0.5, 0.75]
    assert Arrivals(Kind.CONSTANT, 0.1, 1).times(random.Random()) == [0]


def test_poisson_gaps_vary_as_they_should() -> None:
    times = Arrivals(Kind.POISSON, 10, 5000).times(random.Random(3))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.03)


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 100))
def test_a_trace_begins_at_once_and_passes_faster(times: list[float], speed: float) -> None:
    found = replayed(times, speed)
    assert found[0] == 0
    assert found == sorted(found)
    assert found[-1] == pytest.approx((max(times) - min(times)) / speed)


@pytest.mark.parametrize(
    ("kind", "changed", "field"),
    [
        (Kind.POISSON, {"rate": 0}, "rate"),
        (Kind.POISSON, {"rate": float("nan")}, "rate"),
        (Kind.CONSTANT, {"seconds": float("inf")}, "seconds"),
        (Kind.RAMP, {}, "to_rate"),
        (Kind.BURSTS, {"burst_rate": 5, "period_s": 2}, "burst_s"),
        (Kind.BURSTS, {"burst_rate": 5, "period_s": 2, "burst_s": 3}, "burst_s"),
        (Kind.POISSON, {"rate": 1e9}, "rate"),
    ],
)
def test_what_cannot_be_is_named(kind: Kind, changed: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Arrivals(**{"kind": kind, "rate": 1.0, "seconds": 60.0, **changed})  # type: ignore[arg-type]
    assert caught.value.field == f"arrivals.{field}"
