"""One sentence for each shape of a decision, with the numbers that decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.observe.request_record import AttemptRecord, outline, why
from batonlm.core.routing.load import WorkerSnapshot, WorkerSpeed, WorkerState
from batonlm.core.routing.routing import (
    ADOPTS,
    RETURNS,
    Decision,
    PoolSnapshot,
    RoutingPolicy,
    decide,
)
from tests.core.test_routing import DEMAND, LAYOUT, worker

BY_SPEED = RoutingPolicy()
BY_LENGTH = RoutingPolicy(50)


def said(
    prefills: list[WorkerSnapshot],
    policy: RoutingPolicy = BY_LENGTH,
    *,
    split: bool = True,
    tokens: int = 100,
    outputs: bool = True,
) -> str:
    return why(chosen(prefills, policy, tokens, outputs), policy, split=split)


def chosen(
    prefills: list[WorkerSnapshot],
    policy: RoutingPolicy = BY_LENGTH,
    tokens: int = 100,
    outputs: bool = True,
) -> Decision:
    demand = replace(DEMAND, input_tokens=tokens, needs_decode=outputs)
    return decide(demand, PoolSnapshot(prefills), PoolSnapshot([with_speed(worker("d"))]), policy)


def with_speed(one: WorkerSnapshot, position_s: float = 1e-3) -> WorkerSnapshot:
    speed = WorkerSpeed(
        prefill_step_s=1e-3, prefill_position_s=position_s, step_s=1e-3, handover_s=1e-3
    )
    return replace(one, load=replace(one.load, speed=speed))


def test_a_configured_pool_that_nobody_is_in() -> None:
    assert said([]) == (
        "Prefilled on decode: a prefill pool is configured, but this router knows no live "
        "worker of it."
    )
    assert said([], split=False) == "Prefilled on decode: this router has no prefill pool."


def test_workers_that_could_not_take_it_are_counted_by_their_filter_reason() -> None:
    starting = [worker(name, "prefill", state=WorkerState.STARTING) for name in "ab"]
    other = replace(worker("c", "prefill"), layout=replace(LAYOUT, dtype="bfloat16"))
    assert said([*starting, other]) == (
        "Prefilled on decode: no prefill worker could take it (2 workers: not serving, starting; "
        "1 worker: its KV does not fit the decode worker, dtype: bfloat16 against float32)."
    )


def test_ways_for_kv_that_do_not_meet() -> None:
    decode = replace(worker("d"), transports=("nixl:a",))
    prefill = replace(worker("p", "prefill"), transports=("nixl:b",))
    decision = decide(DEMAND, PoolSnapshot([prefill]), PoolSnapshot([decode]), BY_LENGTH)
    assert "transports: nixl:b against nixl:a" in why(decision, BY_LENGTH, split=True)


def test_a_short_input() -> None:
    pool = [worker("p", "prefill")]
    assert said(pool, tokens=20) == (
        "Prefilled on decode: 20 uncached tokens, and up to 50 are not worth a hand-over "
        "(local_prefill_tokens)."
    )
    assert said(pool, BY_SPEED, tokens=1) == (
        "Prefilled on decode: 1 uncached token, and up to 32 are not worth a hand-over while not "
        "all of these workers have measured their speeds."
    )


def test_the_cheaper_way_with_both_numbers() -> None:
    slow = with_speed(worker("p", "prefill"), position_s=1.0)
    decision = chosen([slow], BY_SPEED)
    assert decision.local_s is not None and decision.remote_s is not None
    assert why(decision, BY_SPEED, split=True) == (
        f"Prefilled on decode: that is predicted to cost less, {decision.local_s:.4f} s against "
        f"{decision.remote_s:.4f} s apart, for 100 uncached tokens."
    )


def test_apart() -> None:
    assert said([worker("p", "prefill")]) == (
        "Prefill and decode ran apart: the input has more than 50 tokens that decode has not "
        "cached (local_prefill_tokens)."
    )
    assert said([worker("p", "prefill")], RoutingPolicy(0)) == (
        "Prefill and decode ran apart: every input is handed over that decode has not cached "
        "(--prefer-split)."
    )
    assert "measured" in said([worker("p", "prefill")], BY_SPEED)
    quick = with_speed(worker("p", "prefill"), position_s=1e-6)
    assert "predicted to cost less" in said([quick], BY_SPEED)


def test_one_token_and_moves() -> None:
    assert "first token" in said([worker("p", "prefill")], outputs=False)
    moved = Decision(None, worker("d").identity, "moves", ())
    assert "came from another decode worker" in why(moved, BY_LENGTH, split=True, moved=True)
    back = Decision(None, worker("d").identity, RETURNS, ())
    assert "went on where it was" in why(back, BY_LENGTH, split=True, moved=True)
    adopted = Decision(None, worker("d").identity, ADOPTS, ())
    assert "Another router had begun it" in why(adopted, BY_LENGTH, split=True, moved=True)


@pytest.mark.parametrize(
    ("prefill", "decode", "moved", "outlined"),
    [
        (True, True, False, "Prefill and decode ran apart."),
        (False, True, False, "Prefilled on decode."),
        (True, False, False, "Every choice ends at its first token, which prefill makes: "),
        (False, True, True, "Its KV came from another decode worker: nothing was prefilled."),
    ],
)
def test_the_outline_has_nothing_of_workers_in_it(
    prefill: bool, decode: bool, moved: bool, outlined: str
) -> None:
    attempt = AttemptRecord(
        number=0,
        position=0,
        input_tokens=9,
        choices=1,
        moved=moved,
        prefill=worker("p", "prefill").identity if prefill else None,
        decode=worker("d").identity if decode else None,
        why="1 worker: is full",
        began_s=0.0,
    )
    assert outline(attempt).startswith(outlined) and "full" not in outline(attempt)
