"""Of many workers few are looked at: the right ones, different ones, and all when need be."""

from __future__ import annotations

from dataclasses import replace

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerLoad, WorkerSnapshot, WorkerState
from batonlm.core.routing.prefix_index import Overlap
from batonlm.core.routing.routing import (
    MAX_DRAWN,
    MAX_HOLDERS,
    Decision,
    Demand,
    FilterReason,
    PoolSnapshot,
    RoutingPolicy,
    decide,
    filtered,
)

DEMAND = Demand("r", input_tokens=700, choices=1, needs_decode=True)
POOL = [
    WorkerSnapshot(
        WorkerIdentity("decode", f"d{number}", ""),
        model=ModelDescription("m", "d", 10_000, 10, ()),
        load=WorkerLoad(WorkerState.SERVING, free_blocks=1000),
        block_size=1,
        number=number,
    )
    for number in range(1000)
]


def route(demand: Demand, workers: list[WorkerSnapshot], overlap: Overlap) -> Decision:
    return decide(demand, PoolSnapshot([]), PoolSnapshot(workers, overlap), RoutingPolicy())


def test_who_holds_the_prompt_is_looked_at_among_a_thousand() -> None:
    for holder in (0, 500, 999):
        decision = route(DEMAND, POOL, Overlap(((10, 1 << holder),)))
        assert decision.decode == POOL[holder].identity
        assert decision.uncached_tokens == 60
        assert len(decision.candidates) <= MAX_DRAWN + 1


def test_few_are_looked_at_however_many_hold_it() -> None:
    everyone = Overlap(((10, (1 << 1000) - 1),))
    most = MAX_DRAWN + MAX_HOLDERS
    assert len(filtered(DEMAND, PoolSnapshot(POOL, everyone)).fitting) <= most
    assert len(filtered(DEMAND, PoolSnapshot(POOL[:most], everyone)).fitting) == most, (
        "a small pool"
    )


def test_requests_draw_differently_and_spread() -> None:
    picked = {
        route(replace(DEMAND, request_id=f"r{number}"), POOL, Overlap()).decode
        for number in range(200)
    }
    assert len(picked) > 150


def test_a_draw_is_the_same_for_the_same_request() -> None:
    assert (
        filtered(DEMAND, PoolSnapshot(POOL)).fitting == filtered(DEMAND, PoolSnapshot(POOL)).fitting
    )


def test_when_none_of_them_can_run_it_all_are_looked_at() -> None:
    draining = WorkerLoad(WorkerState.DRAINING)
    workers = [replace(worker, load=draining) for worker in POOL]
    workers[777] = POOL[777]
    decision = route(DEMAND, workers, Overlap())
    assert decision.decode == POOL[777].identity
    fates = [candidate.filter_reason for candidate in decision.candidates]
    assert fates == [FilterReason.PICKED] + [FilterReason.NOT_SERVING] * 999
