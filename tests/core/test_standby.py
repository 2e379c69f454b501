"""Who stands by gets work when another is missing or nobody else could do it, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerLoad, WorkerSnapshot, WorkerState
from batonlm.core.routing.routing import (
    MAX_DRAWN,
    MAX_HOLDERS,
    Decision,
    Demand,
    FilterReason,
    PoolSnapshot,
    RoutingPolicy,
    decide,
    receiver_for,
)

SERVING = WorkerLoad(WorkerState.SERVING, free_blocks=1000)
DEMAND = Demand("r", input_tokens=700, choices=1, needs_decode=True)


def decode(name: str, *, standby: bool = False) -> WorkerSnapshot:
    model = ModelDescription("m", "d", 10_000, 10, ())
    identity = WorkerIdentity("decode", name, "")
    return WorkerSnapshot(identity, model=model, load=SERVING, block_size=1, standby=standby)


# Busier than what stands by, which would be picked by cost alone.
AT_WORK = replace(decode("at-work"), placed_sequences=9)
STANDBY = decode("standby", standby=True)


def route(demand: Demand, *workers: WorkerSnapshot, missing: bool = False) -> Decision:
    return decide(demand, PoolSnapshot([]), PoolSnapshot(workers, missing=missing), RoutingPolicy())


def fates(decision: Decision) -> dict[str, FilterReason]:
    return {
        candidate.identity.instance_id: candidate.filter_reason for candidate in decision.candidates
    }


def test_it_gets_nothing_while_nobody_is_missing() -> None:
    decision = route(DEMAND, AT_WORK, STANDBY)
    assert fates(decision) == {"at-work": FilterReason.PICKED, "standby": FilterReason.STANDS_BY}
    assert "decode standby: stands by, and no other is missing" in decision.lines()


def test_it_is_one_like_all_others_while_one_is_missing() -> None:
    decision = route(DEMAND, AT_WORK, STANDBY, missing=True)
    assert fates(decision) == {"at-work": FilterReason.OUTSCORED, "standby": FilterReason.PICKED}
    assert any(line.startswith("decode standby: picked a standby") for line in decision.lines())


@pytest.mark.parametrize(
    ("demand", "called"),
    [
        (replace(DEMAND, failed=frozenset({"at-work"})), True),
        (replace(DEMAND, ejected=frozenset({"at-work"})), True),
        (replace(DEMAND, busy=frozenset({"at-work"})), False),
        (replace(DEMAND, quarantined=frozenset({"at-work"})), False),
    ],
)
def test_it_helps_where_nobody_else_can_and_not_where_others_are_busy(
    demand: Demand, called: bool
) -> None:
    decision = route(demand, AT_WORK, STANDBY)
    assert fates(decision)["standby"] is (FilterReason.PICKED if called else FilterReason.STANDS_BY)
    assert decision.wait is not called


def test_alone_it_takes_everything() -> None:
    assert route(DEMAND, STANDBY).decode == STANDBY.identity


def test_who_serves_another_model_is_nobody_else() -> None:
    other = replace(AT_WORK, model=replace(AT_WORK.model, name="other"))
    assert route(replace(DEMAND, model="m"), other, STANDBY).decode == STANDBY.identity


def test_in_a_large_pool_others_are_looked_for_before_it_is_called() -> None:
    """Also when only those that stand by were drawn."""
    standbys = [decode(f"s{n}", standby=True) for n in range(20 * (MAX_DRAWN + MAX_HOLDERS))]
    for number in range(20):
        decision = route(replace(DEMAND, request_id=f"r{number}"), *standbys, AT_WORK)
        assert decision.decode == AT_WORK.identity


def test_who_leaves_may_hand_over_to_it() -> None:
    layout = KvLayout("d", "float32", 1, 1, 8, 8)
    sender = replace(AT_WORK, layout=layout)
    leaving = replace(sender, load=replace(SERVING, state=WorkerState.DRAINING))
    standby = replace(STANDBY, layout=layout)
    other = replace(decode("other"), layout=layout, placed_sequences=9)
    assert receiver_for(DEMAND, [other, standby], sender) == other.identity
    assert receiver_for(DEMAND, [other, standby], leaving) == standby.identity
