"""ConcurrencyLimiter: grows while used, shrinks once per round trip, and always lets one in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.admission.concurrency_limiter import DECREASE, ConcurrencyLimiter


def test_a_used_window_doubles_until_the_first_congestion() -> None:
    window = ConcurrencyLimiter(1000, 100, 10_000)
    for limit in (2000, 4000, 8000, 10_000):
        window.take(round(window.limit))
        window.answered(window.tokens, 0.1)
        window.give_back(window.tokens)
        assert window.limit == limit
    window.congested(0.0)
    assert window.limit == 7000
    window.take(7000)
    window.answered(7000, 0.1)
    assert window.limit == 7100


def test_a_used_window_grows_by_a_step_per_windowful() -> None:
    window = ConcurrencyLimiter(1000 / DECREASE, 100, 10_000)
    window.congested(0.0)
    for _ in range(10):
        window.take(100)
    for _ in range(5):
        window.answered(100, 0.1)
        window.give_back(100)
    assert 1045 < window.limit <= 1050
    limit = window.limit
    for _ in range(5):
        window.answered(100, 0.1)
        window.give_back(100)
    assert window.limit == limit, "less than half of it was used"


def test_congestion_shrinks_it_once_per_round_trip() -> None:
    window = ConcurrencyLimiter(1000, 100, 10_000)
    window.answered(1, 2.0)
    window.congested(10.0)
    window.congested(11.0)
    assert window.limit == 700
    window.congested(12.0)
    assert round(window.limit) == 490
    for at in range(13, 60, 2):
        window.congested(float(at))
    assert window.limit == 100


def test_a_long_queue_at_a_worker_is_congestion_and_a_long_prompt_is_not() -> None:
    window = ConcurrencyLimiter(1000, 100, 10_000)
    window.queued(queue_s=2.0, compute_s=1.0, now=0.0)
    window.queued(queue_s=0.09, compute_s=0.001, now=0.0)
    assert window.limit == 1000
    window.queued(queue_s=5.0, compute_s=1.0, now=0.0)
    assert window.limit == 700


@given(st.integers(1, 10**6), st.lists(st.integers(1, 500), max_size=20))
def test_one_alone_has_room_and_all_is_given_back(first: int, others: list[int]) -> None:
    window = ConcurrencyLimiter(1000, 100, 10_000)
    assert window.has_room(first)
    window.take(first)
    taken = [first]
    for tokens in others:
        if window.has_room(tokens):
            window.take(tokens)
            taken.append(tokens)
    assert len(taken) == 1 or sum(taken) <= window.limit
    for tokens in taken:
        window.give_back(tokens)
    assert window.tokens == 0


def test_routers_that_share_workers_meet_at_equal_windows() -> None:
    """What AIMD is for: from any start, with the same signals."""
    a, b = ConcurrencyLimiter(10_000, 100, 10**6), ConcurrencyLimiter(500, 100, 10**6)
    for round_ in range(400):
        for window in (a, b):
            window.tokens = int(window.limit)
            window.answered(window.tokens, 0.1)
        if a.limit + b.limit > 8000:
            a.congested(float(round_))
            b.congested(float(round_))
    assert 0.8 < a.limit / b.limit < 1.25
