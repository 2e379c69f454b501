"""Routing: who may be picked, who is, and that every candidate's fate is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerLoad, WorkerSnapshot, WorkerState
from batonlm.core.routing.routing import (
    Decision,
    Demand,
    FilterReason,
    PoolSnapshot,
    RoutingPolicy,
    decide,
    is_stalled,
    receiver_for,
    shortage,
)

MODEL = ModelDescription("m", "d1", 100, 10, (), "t1")
LAYOUT = KvLayout("d1", "float32", 2, 1, 8, 8)
DEMAND = Demand("r", input_tokens=100, choices=1, needs_decode=True, model="m")


def worker(name: str, role: str = "decode", **load: Any) -> WorkerSnapshot:
    given: dict[str, Any] = {"state": WorkerState.SERVING, "free_blocks": 100, **load}
    return WorkerSnapshot(
        WorkerIdentity(role, name, f"{name}:1"),
        layout=LAYOUT,
        model=MODEL,
        load=WorkerLoad(**given),
        block_size=16,
    )


def route(
    demand: Demand,
    prefills: list[WorkerSnapshot],
    decodes: list[WorkerSnapshot],
    local_prefill_tokens: int = 32,
) -> Decision:
    return decide(
        demand, PoolSnapshot(prefills), PoolSnapshot(decodes), RoutingPolicy(local_prefill_tokens)
    )


def pool(of_role: str) -> st.SearchStrategy[list[WorkerSnapshot]]:
    """Up to six workers of a role, no two of one name."""
    snapshots = st.builds(
        lambda name, role, state, waiting, running, free, placed, layout, model: replace(
            worker(
                name,
                role,
                state=state,
                waiting_tokens=waiting,
                running_sequences=running,
                free_blocks=free,
            ),
            placed_sequences=placed,
            layout=layout,
            model=model,
        ),
        name=st.text("abcdef", min_size=4, max_size=4),
        role=st.just(of_role),
        state=st.sampled_from(WorkerState),
        waiting=st.integers(0, 10_000),
        running=st.integers(0, 100),
        free=st.integers(0, 100),
        placed=st.integers(0, 100),
        layout=st.sampled_from([LAYOUT, replace(LAYOUT, dtype="bfloat16"), None]),
        model=st.sampled_from([MODEL, replace(MODEL, name="other"), replace(MODEL, digest="d2")]),
    )
    return st.lists(snapshots, max_size=6, unique_by=lambda s: s.identity.instance_id)


prefill_pools, decode_pools = pool("prefill"), pool("decode")
demands = st.builds(
    Demand,
    request_id=st.text("xyz", max_size=5),
    input_tokens=st.integers(1, 1000),
    choices=st.integers(1, 4),
    needs_decode=st.booleans(),
    model=st.sampled_from(["", "m"]),
    model_digest=st.sampled_from(["", "d1"]),
    failed=st.frozensets(st.text("abcdef", min_size=4, max_size=4), max_size=2),
)


@given(demands, prefill_pools, decode_pools)
def test_only_workers_that_can_run_it_are_picked(
    demand: Demand, prefills: list[WorkerSnapshot], decodes: list[WorkerSnapshot]
) -> None:
    decision = route(demand, prefills, decodes)
    by_id = {w.identity: w for w in (*prefills, *decodes)}
    for picked in (decision.prefill, decision.decode):
        if picked is not None:
            found = by_id[picked]
            assert found.load.state is WorkerState.SERVING
            assert demand.model in ("", found.model.name)
            assert demand.model_digest in ("", found.model.digest)
            assert picked.instance_id not in demand.failed
    if decision.prefill is not None and decision.decode is not None:
        sender, receiver = by_id[decision.prefill].layout, by_id[decision.decode].layout
        if receiver is not None:
            assert sender is not None and not sender.difference(receiver)
    if demand.needs_decode:
        assert decision.decode is not None or decision.prefill is None


@given(demands, prefill_pools, decode_pools)
def test_the_cheapest_wins_whatever_the_order(
    demand: Demand, prefills: list[WorkerSnapshot], decodes: list[WorkerSnapshot]
) -> None:
    decision = route(demand, prefills, decodes)
    assert (decision.prefill, decision.decode) == (
        (again := route(demand, prefills[::-1], decodes[::-1])).prefill,
        again.decode,
    )
    if decision.decode is not None:
        costs = {c.identity: c.cost.total for c in decision.candidates if c.cost is not None}
        of_decodes = [costs[d.identity] for d in decodes if d.identity in costs]
        assert costs[decision.decode] == min(of_decodes)


@given(demands, prefill_pools, decode_pools)
def test_every_candidate_has_a_filter_reason(
    demand: Demand, prefills: list[WorkerSnapshot], decodes: list[WorkerSnapshot]
) -> None:
    decision = route(demand, prefills, decodes)
    picked = {c.identity for c in decision.candidates if c.filter_reason is FilterReason.PICKED}
    assert {decision.prefill, decision.decode} - {None} <= picked
    if demand.needs_decode:
        assert {d.identity for d in decodes} <= {c.identity for c in decision.candidates}
    assert decision.reason


@pytest.mark.parametrize(
    "lighter",
    [
        {"waiting_tokens": 10},
        {"running_sequences": 1},
        {"waiting_sequences": 1},
        {"free_blocks": 5},
    ],
)
def test_less_load_wins(lighter: dict[str, Any]) -> None:
    heavy = {
        "waiting_tokens": 200,
        "running_sequences": 9,
        "waiting_sequences": 9,
        "free_blocks": 1,
    }
    name = next(iter(lighter))
    heavier: dict[str, Any] = {name: heavy[name]}
    decodes = [worker("heavy", **heavier), worker("light", **lighter)]
    decision = route(DEMAND, [], decodes)
    assert decision.decode is not None
    assert decision.decode.instance_id == "light"


def test_what_was_just_placed_counts_before_it_is_reported() -> None:
    kinds: list[dict[str, Any]] = [
        {"placed_sequences": 3},
        {"fresh_sequences": 1},
        {"fresh_tokens": 5},
    ]
    for placed in kinds:
        decodes = [replace(worker("placed"), **placed), worker("idle")]
        assert route(DEMAND, [], decodes).decode == decodes[1].identity


def test_equal_workers_share_the_requests() -> None:
    decodes = [worker(name) for name in "abcd"]
    counts = dict.fromkeys("abcd", 0)
    for number in range(400):
        decision = route(replace(DEMAND, request_id=f"r{number}"), [], decodes)
        assert decision.decode is not None
        counts[decision.decode.instance_id] += 1
    assert min(counts.values()) > 60


@pytest.mark.parametrize(("tokens", "remote"), [(32, False), (33, True)])
def test_short_inputs_are_prefilled_on_decode(tokens: int, remote: bool) -> None:
    decision = route(replace(DEMAND, input_tokens=tokens), [worker("p", "prefill")], [worker("d")])
    assert (decision.prefill is not None) is remote


def test_a_worker_that_does_not_fit_is_named_with_the_difference() -> None:
    prefill = replace(worker("p", "prefill"), layout=replace(LAYOUT, num_kv_heads=4))
    decision = route(DEMAND, [prefill], [worker("d")])
    assert decision.prefill is None
    assert decision.decode is not None
    (candidate,) = [c for c in decision.candidates if c.identity == prefill.identity]
    assert candidate.filter_reason is FilterReason.OTHER_LAYOUT
    assert candidate.detail == "num_kv_heads: 4 against 1"


@pytest.mark.parametrize(
    ("transports", "fits"),
    [(("nixl", "loopback"), True), (("loopback",), True), ((), True), (("nixl",), False)],
)
def test_pairs_have_a_transport_in_common(transports: tuple[str, ...], fits: bool) -> None:
    """As far as they are known: decode is there with loopback only."""
    prefill = replace(worker("p", "prefill"), transports=transports)
    decision = route(DEMAND, [prefill], [replace(worker("d"), transports=("loopback",))])
    assert (decision.prefill is not None) is fits
    assert decision.decode is not None
    if not fits:
        assert decision.candidates[-1].detail == "transports: nixl against loopback"


def test_busy_prefill_is_waited_for_and_failed_prefill_is_not() -> None:
    prefills, decodes = [worker("p", "prefill")], [worker("d")]
    assert route(replace(DEMAND, busy=frozenset({"p"})), prefills, decodes).wait
    failed = route(replace(DEMAND, failed=frozenset({"p"})), prefills, decodes)
    assert failed.prefill is None
    assert failed.decode is not None


def test_one_token_runs_on_prefill_alone_or_else_on_decode() -> None:
    demand = replace(DEMAND, needs_decode=False)
    alone = route(demand, [worker("p", "prefill")], [worker("d")])
    assert alone.prefill is not None
    assert alone.decode is None
    without = route(demand, [], [worker("d")])
    assert without.prefill is None
    assert without.decode is not None


def test_another_tokenizer_is_another_language() -> None:
    decision = route(replace(DEMAND, tokenizer_digest="t2"), [], [worker("d")])
    assert decision.wait
    assert decision.candidates[0].filter_reason is FilterReason.OTHER_TOKENIZER


@given(st.integers(0, 10**8), st.integers(0, 10**8))
def test_a_step_is_dead_after_2_s_and_three_times_its_prediction(age: int, predicted: int) -> None:
    assert is_stalled(age, predicted) == (age > 2_000_000 and age > 3 * predicted)


def test_sequences_move_only_where_all_of_them_fit() -> None:
    demand = replace(DEMAND, input_tokens=160, choices=2)
    roomy, busier = worker("a", free_blocks=11), worker("b", free_blocks=11, waiting_tokens=5)
    sender = worker("sender", state=WorkerState.DRAINING)
    assert receiver_for(demand, [sender, busier, roomy], sender) == roomy.identity
    others = [
        worker("c", free_blocks=10),
        worker("d", state=WorkerState.DRAINING),
        replace(worker("e", running_sequences=3), max_sequences=4),
        replace(worker("f"), layout=replace(LAYOUT, num_layers=3)),
        replace(worker("g"), layout=None),
    ]
    assert receiver_for(demand, others, sender) is None
    places = replace(worker("h", running_sequences=2), max_sequences=4)
    assert receiver_for(demand, [*others, places], sender) == places.identity


def test_a_workers_room_is_what_states_leave() -> None:
    """A state of 20 positions takes two blocks of 16, of every sequence."""
    plain = replace(
        worker("w", running_sequences=3, free_blocks=10),
        num_blocks=30,
        fresh_sequences=2,
        fresh_positions=5,
    )
    with_states = replace(plain, layout=replace(LAYOUT, state_positions=20))
    demand = replace(DEMAND, input_tokens=60, choices=2)
    assert (plain.free_positions, with_states.free_positions) == (155, 155 - 2 * 32)
    assert (plain.used_positions, with_states.used_positions) == (320, 320 - 3 * 32)
    assert plain.positions_taken(60, 2) == 62
    assert with_states.positions_taken(60, 2) == 62 + 2 * 32
    assert shortage(demand, plain) == 0
    assert shortage(demand, with_states) == 62 + 64 - 91
