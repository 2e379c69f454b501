"""Routing: what a worker's tiers hold counts at the time that it takes to bring it back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.routing.load import WorkerSnapshot, WorkerSpeed
from batonlm.core.routing.prefix_index import NO_OVERLAP, Overlap
from batonlm.core.routing.routing import Decision, Demand, PoolSnapshot, RoutingPolicy, decide
from tests.core.test_routing import DEMAND
from tests.core.test_routing_by_speed import SPEED, measured

TURN = replace(DEMAND, input_tokens=64 * 32 + 10)
PLAIN = RoutingPolicy(0)
FAST = replace(SPEED, disk_bytes_per_s=1e9)


def pair(speed: WorkerSpeed = FAST) -> list[WorkerSnapshot]:
    """The first one has a disk."""
    found = [measured("a", speed=speed), measured("b", speed=speed)]
    workers = [replace(w, number=i, kv_bytes_per_position=1000) for i, w in enumerate(found)]
    return [replace(workers[0], tiers=(("disk", 0),)), workers[1]]


def routed(
    workers: list[WorkerSnapshot],
    tiers: Overlap,
    own: Overlap = NO_OVERLAP,
    demand: Demand = TURN,
    policy: RoutingPolicy = PLAIN,
) -> Decision:
    view = PoolSnapshot(workers, own, tiers=tiers)
    return decide(demand, PoolSnapshot([]), view, policy)


def test_a_worker_whose_disk_has_the_prompt_is_picked() -> None:
    decision = routed(pair(), Overlap(((32, 1),)))
    assert decision.decode is not None and decision.decode.instance_id == "a"
    assert decision.uncached_tokens == 10
    (cost,) = [each.cost for each in decision.candidates if each.identity == decision.decode]
    assert cost is not None and cost.collect_s == pytest.approx(64 * 32 * 1000 / 1e9)


def test_what_is_in_a_cache_is_better_than_what_is_on_a_disk() -> None:
    decision = routed(pair(), Overlap(((32, 1),)), Overlap(((32, 2),)))
    assert decision.decode is not None and decision.decode.instance_id == "b"


def test_a_disk_that_is_slower_than_computing_counts_nothing() -> None:
    workers = pair(replace(SPEED, disk_bytes_per_s=1e3))
    assert routed(workers, Overlap(((32, 1),))).uncached_tokens == TURN.input_tokens


def test_only_what_is_missing_is_collected_behind_what_a_tier_has() -> None:
    workers = [*pair(), replace(measured("c", speed=FAST), number=2, kv_bytes_per_position=1000)]
    demand = replace(TURN, busy=frozenset({"b", "c"}))
    policy = RoutingPolicy(0, collect_prefix_tokens=64)
    own = Overlap(((32, 0b100),))
    decision = routed(workers, Overlap(((30, 1),)), own, demand, policy)
    assert decision.plan is not None and decision.plan.sender.instance_id == "c"
    alone = routed(workers, NO_OVERLAP, own, demand, policy)
    assert alone.plan is not None
    assert decision.plan.num_tokens == alone.plan.num_tokens == 64 * 32
    assert routed(workers, Overlap(((32, 1),)), own, demand, policy).plan is None


@given(
    own=st.integers(0, 32),
    host=st.integers(0, 32),
    store=st.integers(0, 32),
    rates=st.tuples(st.floats(1e2, 1e12), st.floats(1e2, 1e12)),
    position_s=st.floats(1e-6, 1e-2),
)
def test_a_tier_never_makes_a_prediction_worse(
    own: int, host: int, store: int, rates: tuple[float, float], position_s: float
) -> None:
    speed = replace(
        SPEED, host_bytes_per_s=rates[0], store_bytes_per_s=rates[1], prefill_position_s=position_s
    )
    worker = replace(pair(speed)[0], tiers=(("host", 0), ("store", 1)))
    held = Overlap(((own, 1),) if own else ())
    groups = [(host, 3)] if host == store else sorted([(host, 1), (store, 2)], reverse=True)
    tiers = Overlap(tuple(group for group in groups if group[0]))
    with_tiers, without = (routed([worker], each, held) for each in (tiers, NO_OVERLAP))
    assert with_tiers.first_token_s is not None and without.first_token_s is not None
    assert with_tiers.first_token_s <= without.first_token_s + 1e-9
    assert 1 <= with_tiers.uncached_tokens <= without.uncached_tokens
