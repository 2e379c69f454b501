"""When quiet steps end, and the classes of the times between their tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_loadtest.simulator.requests import Cadence, gap_quantile, merged, of_steps

CADENCES = st.builds(
    Cadence,
    st.floats(0.0, 1e5),
    st.floats(1e-4, 1.0),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e-3)),
)


@given(CADENCES, st.integers(0, 5000))
def test_a_step_is_done_when_it_has_ended(cadence: Cadence, steps: int) -> None:
    assert cadence.done(cadence.end(steps)) == steps
    middle = (cadence.end(steps) + cadence.end(steps + 1)) / 2
    assert cadence.done(middle) == steps


@given(CADENCES, st.integers(0, 300))
def test_ends_are_sums_of_lengths(cadence: Cadence, steps: int) -> None:
    total = cadence.began + sum(cadence.length(step) for step in range(steps))
    assert cadence.end(steps) == pytest.approx(total, rel=1e-9)
    rest = cadence.after(steps)
    assert rest.end(7) == pytest.approx(cadence.end(steps + 7), rel=1e-9)


@given(CADENCES, st.integers(0, 20), st.integers(0, 2000))
def test_classes_of_many_steps(cadence: Cadence, first: int, count: int) -> None:
    found = merged([{which: n} for which, n in of_steps(cadence, first, first + count)])
    assert sum(found.values()) == count
    for share in (0.0, 0.5, 0.99):
        if count:
            exact = cadence.length(first + int(share * count))
            assert gap_quantile(found, share) == pytest.approx(exact, rel=0.011)


def test_no_quantile_of_nothing() -> None:
    assert gap_quantile({}, 0.5) == 0.0
