"""Events are kept apart only while the process is too busy, and never for long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.router.request.pacing import FIRST_S, LONGEST_S, LoadMonitor


def test_with_time_to_spare_events_come_as_they_come() -> None:
    pace = LoadMonitor(0.6)
    for busy in (0.0, 0.3, 0.6):
        pace.observe(busy)
        assert pace.interval_s == 0.0


def test_what_is_busy_keeps_them_apart_and_what_has_time_lets_them_together() -> None:
    pace, intervals = LoadMonitor(0.6), []
    for _ in range(6):
        pace.observe(0.9)
        intervals.append(pace.interval_s)
    assert intervals == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    pace.observe(0.5)
    assert pace.interval_s == 1.0, "near the limit nothing changes"
    pace.observe(0.225)
    assert pace.interval_s == pytest.approx(0.5), "half as busy as it may be"
    for _ in range(2):
        pace.observe(0.0)
    assert pace.interval_s == 0.0


@given(events=st.floats(0.001, 2), else_=st.floats(0, 0.4), interval_s=st.floats(FIRST_S, 1))
def test_coming_closer_does_not_make_it_too_busy(
    events: float, else_: float, interval_s: float
) -> None:
    """events: what they cost when a second apart."""
    pace = LoadMonitor(0.6)
    pace.interval_s = interval_s
    busy = events / interval_s + else_
    pace.observe(busy)
    if pace.interval_s and busy < 0.45:
        assert events / pace.interval_s + else_ <= 0.45 + else_ + 1e-9


@given(st.lists(st.floats(0, 4)))
def test_it_is_bounded_and_ends(busy: list[float]) -> None:
    pace = LoadMonitor(0.6)
    for share in busy:
        pace.observe(share)
        assert pace.interval_s == 0.0 or FIRST_S <= pace.interval_s <= LONGEST_S
    for _ in range(20):
        pace.observe(0.0)
    assert pace.interval_s == 0.0
