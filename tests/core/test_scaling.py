"""How many workers the rule asks for, and when it lets them go."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import WorkerSpeed
from batonlm.core.routing.scaling import (
    Bounds,
    DecodeSignals,
    PrefillSignals,
    ScalingPolicy,
    ScalingRule,
    Trend,
)

POLICY = ScalingPolicy(1.0, 0.05, busy=0.5, lead_s=10.0, trend_s=5.0, hold_s=60.0)
SPEED = WorkerSpeed(step_s=0.01, row_s=1e-3, context_s=1e-6)


def rule(policy: ScalingPolicy = POLICY, least: int = 1, most: int = 10) -> ScalingRule:
    return ScalingRule(policy, Bounds(least, most), Bounds(least, most))


def test_prefill_follows_the_work_that_comes() -> None:
    found = [rule_.prefill(t, PrefillSignals(1.4 * t, 0.0)) for rule_ in [rule()] for t in range(9)]
    assert found == [1, *[3] * 8]


def test_what_waits_asks_for_workers_before_any_is_known_to_be_busy() -> None:
    assert rule().prefill(0.0, PrefillSignals(0.0, 3.5)) == 4
    assert rule().prefill(0.0, PrefillSignals(0.0, 1e9)) == 10


def test_decode_is_there_when_its_kv_has_grown() -> None:
    asked = rule()
    assert asked.decode(0.0, DecodeSignals(100, 500, WorkerSpeed(), 1000)) == 1
    # 100 more a second, 7 of them by chance, so 1930 when a worker asked for now is there: four at
    # half of their room.
    assert asked.decode(5.0, DecodeSignals(100, 1000, WorkerSpeed(), 1000)) == 4


def test_what_chance_explains_brings_no_workers() -> None:
    """10 sequences that become 14, as they do when requests come at random, stay 14."""
    asked = rule()
    assert asked.decode(0.0, DecodeSignals(10, 10, WorkerSpeed(), 1000, places=8)) == 3
    assert asked.decode(5.0, DecodeSignals(14, 14, WorkerSpeed(), 1000, places=8)) == 4
    assert asked.decode(10.0, DecodeSignals(34, 34, WorkerSpeed(), 1000, places=8)) == 10


def test_decode_keeps_steps_within_the_target() -> None:
    # 100 rows take 100 ms, 20 000 positions 20 ms, and each worker has 40 ms for them.
    assert rule().decode(0.0, DecodeSignals(100, 20_000, SPEED, 1_000_000)) == 3
    assert rule().decode(0.0, DecodeSignals(100, 20_000, SPEED, 1_000_000, places=40)) == 5
    slow = WorkerSpeed(step_s=0.06, row_s=1e-3)
    # One sequence alone takes longer than the target: no number of workers helps.
    assert rule().decode(0.0, DecodeSignals(5, 5, slow, 1000)) == 1
    assert rule().decode(0.0, DecodeSignals(5, 5, slow, 1000, places=2)) == 5
    assert rule().decode(0.0, DecodeSignals(0, 0, slow, 1000)) == 1


def test_a_pool_shrinks_only_after_a_while() -> None:
    asked = rule()
    assert asked.prefill(0.0, PrefillSignals(0.0, 5.0)) == 5
    assert asked.prefill(30.0, PrefillSignals(0.0, 3.0)) == 5
    assert asked.prefill(60.0, PrefillSignals(0.0, 0.0)) == 5
    assert asked.prefill(60.5, PrefillSignals(0.0, 0.0)) == 3
    assert asked.prefill(91.0, PrefillSignals(0.0, 0.0)) == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 20)), min_size=1, max_size=40))
def test_it_is_the_most_that_was_needed_in_a_while(steps: list[tuple[float, int]]) -> None:
    """What waits counts as the mean of the period, so one reading cannot bring many workers."""
    asked, now, seen, needed = rule(least=0, most=15), 0.0, [], []
    for passed, queued in steps:
        now += passed
        seen.append((now, queued))
        lately = [queued for at, queued in seen if at >= now - POLICY.trend_s]
        needed.append((now, Bounds(0, 15).within(fmean(lately))))
        found = asked.prefill(now, PrefillSignals(0.0, float(queued)))
        assert found == max(need for at, need in needed if at >= now - POLICY.hold_s)


def decode_by(
    placed_per_s: float, refused_per_s: float, rows: float, waiting: float = 0.0, prefills: int = 0
) -> list[int]:
    """The targets of 20 s with these rates; a worker runs 10 sequences, at half of that."""
    asked = rule(replace(POLICY, lead_s=0.0, trend_s=20.0), most=100)
    return [
        asked.decode(
            float(t),
            DecodeSignals(
                rows,
                0,
                WorkerSpeed(),
                0,
                places=10,
                placed=placed_per_s * t,
                refused=refused_per_s * t,
                waiting=waiting,
                prefills=prefills,
            ),
        )
        for t in range(21)
    ]


def test_refused_work_counts_as_the_sequences_that_it_would_be() -> None:
    # 10 of 15 requests are refused. The 5 keep 10 sequences running, so all would be 30.
    assert decode_by(1.0, 2.0, 10.0)[-1] == 6
    assert decode_by(1.0, 0.0, 10.0)[-1] == 2
    # Nothing was placed for a while: each is at most one sequence.
    assert decode_by(0.0, 2.0, 10.0)[-1] == 10
    # Requests that are over in no time add little.
    assert decode_by(10.0, 20.0, 1.0)[-1] == 1


def test_what_is_refused_for_lack_of_prefill_adds_nothing_to_decode() -> None:
    """Clients that try again at once are refused 100 times a second."""
    assert decode_by(1.0, 100.0, 8.0, prefills=1)[-1] == 2
    # Nine of ten places are taken: decode is what they wait for.
    assert decode_by(1.0, 100.0, 9.0, prefills=1)[-1] == 100
    assert decode_by(1.0, 100.0, 8.0)[-1] == 100


def test_what_waits_for_prefill_adds_little_to_decode() -> None:
    assert decode_by(1.0, 0.0, 1.0, waiting=100.0)[-1] == 2
    assert decode_by(1.0, 0.0, 8.0, waiting=100.0)[-1] == 10


@given(
    st.lists(st.tuples(st.floats(0.1, 30), *[st.integers(0, 1000)] * 4), min_size=1, max_size=30)
)
def test_more_refused_work_never_asks_for_fewer_workers(
    steps: list[tuple[float, int, int, int, int]],
) -> None:
    more, less = rule(most=1000), rule(most=1000)
    now, placed, refused = 0.0, 0, 0
    for passed, rows, new, gone, waiting in steps:
        now, placed, refused = now + passed, placed + new, refused + gone
        each = DecodeSignals(rows, 10 * rows, SPEED, 5000, 64, 2, placed, waiting=waiting)
        found = more.decode(now, replace(each, refused=refused))
        assert less.decode(now, each) <= found <= 1000


@pytest.mark.parametrize(
    ("rows", "positions", "full"),
    [(115, 0, False), (116, 0, True), (0, 1799, False), (0, 1800, True)],
)
def test_a_pool_is_full_by_its_sequences_or_by_its_kv(
    rows: int, positions: int, full: bool
) -> None:
    assert DecodeSignals(rows, positions, SPEED, 1000, 64, 2).is_full == full
    assert not DecodeSignals(rows, positions, SPEED, 0, 0, 2).is_full


def test_a_trend_forgets() -> None:
    trend = Trend(10.0)
    assert [trend.per_second(t, v) for t, v in ((0, 5), (5, 15), (20, 15), (30, 15))] == [
        0.0, 2.0, 0.0, 0.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"first_token_s": 0.0}, "first_token_s"),
        ({"between_tokens_s": float("nan")}, "between_tokens_s"),
        ({"busy": 1.1}, "busy"),
        ({"lead_s": -1.0}, "lead_s"),
        ({"trend_s": 0.0}, "trend_s"),
    ],
)
def test_what_is_no_policy(values: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ScalingPolicy(**{"first_token_s": 1.0, "between_tokens_s": 0.1} | values)
    assert caught.value.field == field
    with pytest.raises(InvalidArgument):
        Bounds(3, 2)
