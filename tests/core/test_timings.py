"""Times land in the bucket whose bound they do not exceed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.observe.timings import BOUNDS_S, Durations


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_every_time_is_in_one_bucket(seconds: list[float]) -> None:
    timings = Durations()
    for each in seconds:
        timings.add(each)
    assert timings.count == len(seconds)
    # Newer Pythons' sums round less.
    assert timings.total_s == pytest.approx(sum(seconds))
    for index, bound in enumerate(BOUNDS_S):
        assert sum(timings.counts[: index + 1]) == sum(each <= bound for each in seconds)
