"""Routing: when the worker that computes collects a prefix from another one's cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.routing.load import WorkerSnapshot, WorkerSpeed, WorkerState
from batonlm.core.routing.prefix_index import Overlap
from batonlm.core.routing.routing import Decision, Demand, PoolSnapshot, RoutingPolicy, decide
from tests.core.test_routing import DEMAND
from tests.core.test_routing_by_speed import SPEED, measured

TURN = replace(DEMAND, input_tokens=64 * 32 + 10)
BY_TIME = RoutingPolicy(0, collect_prefix_tokens=-1)
FULL = frozenset({"a"})


def pair(speed: WorkerSpeed = SPEED, **load: Any) -> list[WorkerSnapshot]:
    """The first one has 32 units of the prompt."""
    found = [measured("a", **load), measured("b", speed=speed)]
    return [replace(w, number=i, kv_bytes_per_position=1000) for i, w in enumerate(found)]


def routed(
    workers: list[WorkerSnapshot],
    policy: RoutingPolicy = BY_TIME,
    demand: Demand = TURN,
    units: int = 32,
) -> Decision:
    view = PoolSnapshot(workers, Overlap(((units, 1),)))
    return decide(demand, PoolSnapshot([]), view, policy)


def full(demand: Demand = TURN) -> Demand:
    return replace(demand, busy=FULL)


def test_an_idle_holder_computes_the_rest_itself() -> None:
    decision = routed(pair())
    assert decision.decode is not None and decision.decode.instance_id == "a"
    assert decision.plan is None


def test_when_the_holder_is_full_another_one_collects() -> None:
    workers = pair()
    decision = routed(workers, demand=full())
    assert decision.decode == workers[1].identity
    assert decision.plan is not None
    assert (decision.plan.sender, decision.plan.num_tokens) == (workers[0].identity, 64 * 32)
    assert decision.uncached_tokens == 10
    assert decision.reason_to_collect == "busy"
    # Its hand-overs take 30 ms and 2 MB more at 1 GB/s.
    assert decision.plan.collect_s == pytest.approx(0.032, abs=0.001)


def test_a_busy_holder_is_worth_less_than_one_that_collects() -> None:
    decision = routed(pair(waiting_tokens=2000))
    assert decision.decode is not None and decision.decode.instance_id == "b"
    assert decision.plan is not None and decision.reason_to_collect == "outscored"


@pytest.mark.parametrize(
    ("units", "link", "collects"), [(32, 1e9, True), (2, 1e9, False), (32, 1e6, False)]
)
def test_nothing_is_collected_that_is_computed_as_fast(
    units: int, link: float, collects: bool
) -> None:
    speed = replace(SPEED, link_bytes_per_s=link)
    decision = routed(pair(speed), demand=full(), units=units)
    assert (decision.plan is not None) is collects


@given(
    units=st.integers(1, 32),
    own=st.integers(0, 32),
    link=st.floats(1e5, 1e11),
    handover_s=st.floats(0.0, 1.0),
    position_s=st.floats(1e-6, 1e-2),
)
def test_collecting_is_never_predicted_to_be_slower(
    units: int, own: int, link: float, handover_s: float, position_s: float
) -> None:
    speed = replace(
        SPEED, link_bytes_per_s=link, handover_s=handover_s, prefill_position_s=position_s
    )
    workers = pair(speed)
    held = [(units, 3)] if units == own else sorted([(units, 1), (own, 2)], reverse=True)
    view = PoolSnapshot(workers, Overlap(tuple(group for group in held if group[0])))
    here, there = (
        decide(full(), PoolSnapshot([]), view, policy) for policy in (RoutingPolicy(0), BY_TIME)
    )
    assert there.first_token_s is not None and here.first_token_s is not None
    assert there.first_token_s <= here.first_token_s
    assert there.uncached_tokens <= here.uncached_tokens
    assert there.plan is None or there.plan.num_tokens > 64 * own


def test_by_a_number_of_tokens_speeds_do_not_matter() -> None:
    workers = [replace(w, load=replace(w.load, speed=WorkerSpeed())) for w in pair()]
    for least, collects in ((64 * 32, True), (64 * 32 + 1, False), (0, False)):
        decision = routed(workers, RoutingPolicy(0, collect_prefix_tokens=least), full())
        assert (decision.plan is not None) is collects
    assert routed(workers, BY_TIME, full()).plan is None, "nobody has measured anything"


def changed(holder: WorkerSnapshot, what: str) -> WorkerSnapshot:
    match what:
        case "model":
            return replace(holder, model=replace(holder.model, digest="other"))
        case "exact":
            return replace(holder, exact=not holder.exact)
        case "starting":
            return replace(holder, load=replace(holder.load, state=WorkerState.STARTING))
        case "state":
            assert holder.layout is not None
            return replace(holder, layout=replace(holder.layout, state_positions=8))
        case _:
            return replace(holder, layout=None)


@pytest.mark.parametrize("what", ["model", "exact", "starting", "state", "layout"])
def test_only_who_computes_the_same_gives(what: str) -> None:
    holder, other = pair()
    assert routed([holder, other], demand=full()).plan is not None
    assert routed([changed(holder, what), other], demand=full()).plan is None


def test_who_gave_none_a_moment_ago_is_left_alone() -> None:
    for withheld in ("failed", "ejected", "not_giving"):
        demand = replace(full(), **{withheld: FULL})  # type: ignore[arg-type]
        assert routed(pair(), demand=demand).plan is None
    assert routed(pair(), demand=replace(full(), scored=True)).plan is None


def test_who_collects_none_is_not_asked_to() -> None:
    assert routed(pair(), demand=full()).plan is not None
    older = replace(full(), not_collecting=frozenset({"b"}))
    assert routed(pair(), demand=older).plan is None


def test_a_prefill_worker_collects_from_either_pool() -> None:
    """Decode collects what prefill hands over, and nothing else."""
    decodes = PoolSnapshot(pair(waiting_tokens=2000), Overlap(((32, 1),)))
    prefills = [
        replace(measured(name, "prefill", free_blocks=1000), number=i, kv_bytes_per_position=1000)
        for i, name in enumerate(("p", "q"))
    ]
    prefills[1] = replace(prefills[1], load=replace(prefills[1].load, waiting_tokens=4000))
    policy = replace(BY_TIME, local_prefill_tokens=0)
    for held, sender in ((Overlap(), "a"), (Overlap(((31, 2),)), "a"), (Overlap(((33, 2),)), "q")):
        demand = replace(TURN, input_tokens=64 * 33 + 10)
        decision = decide(demand, PoolSnapshot(prefills, held), decodes, policy)
        assert decision.prefill == prefills[0].identity
        assert decision.plan is not None and decision.plan.sender.instance_id == sender
