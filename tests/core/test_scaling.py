"""How many workers the rule asks for, and when it lets them go."""

from __future__ import annotations

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
    assert asked.decode(0.0, DecodeSignals(1, 500, WorkerSpeed(), 1000)) == 1
    # 100 more a second, so 2000 when a worker asked for now is there: four at half of their room.
    assert asked.decode(5.0, DecodeSignals(1, 1000, WorkerSpeed(), 1000)) == 4


def test_decode_keeps_steps_within_the_target() -> None:
    # 100 rows take 100 ms, 20 000 positions 20 ms, and each worker has 40 ms for them.
    assert rule().decode(0.0, DecodeSignals(100, 20_000, SPEED, 1_000_000)) == 3
    assert rule().decode(0.0, DecodeSignals(100, 20_000, SPEED, 1_000_000, places=40)) == 5
    slow = WorkerSpeed(step_s=0.06, row_s=1e-3)
    assert rule().decode(0.0, DecodeSignals(1, 1, slow, 1000)) == 10
    assert rule().decode(0.0, DecodeSignals(0, 0, slow, 1000)) == 1


def test_a_pool_shrinks_only_after_a_while() -> None:
    asked = rule()
    assert asked.prefill(0.0, PrefillSignals(0.0, 5.0)) == 5
    assert asked.prefill(30.0, PrefillSignals(0.0, 3.0)) == 5
    assert asked.prefill(60.0, PrefillSignals(0.0, 0.0)) == 5
    assert asked.prefill(60.5, PrefillSignals(0.0, 0.0)) == 3
    assert asked.prefill(91.0, PrefillSignals(0.0, 0.0)) == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), min_size=1, max_size=40))
def test_it_is_the_most_that_was_needed_in_a_while(steps: list[tuple[float, float]]) -> None:
    asked, now, needed = rule(least=0, most=15), 0.0, []
    for passed, queued in steps:
        now += passed
        needed.append((now, Bounds(0, 15).within(queued)))
        found = asked.prefill(now, PrefillSignals(0.0, queued))
        assert found == max(need for at, need in needed if at >= now - POLICY.hold_s)


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
