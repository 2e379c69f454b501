"""Routing by predicted seconds: what is cached, how fast each worker is, how new it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.routing.load import UNMEASURED, WorkerSnapshot, WorkerSpeed, WorkerState
from batonlm.core.routing.prefix_index import Overlap
from batonlm.core.routing.routing import Decision, Demand, PoolSnapshot, RoutingPolicy, decide
from tests.core.test_routing import DEMAND, route, worker

SPEED = WorkerSpeed(
    step_s=0.010,
    row_s=0.001,
    prefill_step_s=0.002,
    prefill_position_s=0.0002,
    prefill_step_tokens=256,
    link_bytes_per_s=1e9,
    handover_s=0.030,
)


def measured(name: str, role: str = "decode", speed: WorkerSpeed = SPEED, **load: Any) -> Any:
    return replace(worker(name, role, speed=speed, **load), num_blocks=100)


def by_speed(
    demand: Demand, prefills: list[WorkerSnapshot], decodes: list[WorkerSnapshot]
) -> Decision:
    return route(demand, prefills, decodes, -1)


def test_what_is_cached_is_no_work() -> None:
    """A cached prompt outweighs a queue that is shorter than it, and not one that is longer."""
    holder, other = replace(worker("a"), number=0), replace(worker("b"), number=1)
    demand = replace(DEMAND, input_tokens=520)
    view = PoolSnapshot([holder, other], Overlap(((8, 1),)))
    picked = decide(demand, PoolSnapshot([]), view, RoutingPolicy(0))
    assert (picked.decode, picked.uncached_tokens) == (holder.identity, 8)
    for waiting, expected in ((400, "a"), (700, "b")):
        busy = replace(holder, load=replace(holder.load, waiting_tokens=waiting))
        picked = decide(
            demand, PoolSnapshot([]), view._replace(workers=[busy, other]), RoutingPolicy(0)
        )
        assert picked.decode is not None
        assert picked.decode.instance_id == expected


@pytest.mark.parametrize(("rate", "running", "expected"), [(0.0, 0, 0), (1e9, 0, 0), (1e9, 4, 1)])
def test_kv_that_decode_has_need_not_travel(rate: float, running: int, expected: int) -> None:
    """Among equals the one that has the prefix collects; a busier one does not."""
    speed = replace(SPEED, link_bytes_per_s=rate)
    prefills = PoolSnapshot([measured("p", "prefill")])
    decodes = [
        replace(measured(name, speed=speed, free_blocks=1000), number=i, kv_bytes_per_position=9999)
        for i, name in enumerate(("a", "b"))
    ]
    decodes[0] = replace(decodes[0], load=replace(decodes[0].load, running_sequences=running))
    for number in range(20):
        demand = replace(DEMAND, request_id=str(number), input_tokens=4096)
        picked = decide(
            demand, prefills, PoolSnapshot(decodes, Overlap(((8, 1),))), RoutingPolicy(0)
        )
        assert picked.prefill is not None
        assert picked.decode == decodes[expected].identity


def test_a_short_rest_of_a_long_prompt_is_prefilled_on_decode() -> None:
    demand = replace(DEMAND, input_tokens=8 * 64 + 32)
    decodes = [replace(worker("d"), number=3)]
    held = PoolSnapshot(decodes, Overlap(((8, 1 << 3),)))
    for view, remote in ((held, False), (PoolSnapshot(decodes), True)):
        decision = decide(demand, PoolSnapshot([worker("p", "prefill")]), view, RoutingPolicy(32))
        assert (decision.prefill is not None) is remote


@pytest.mark.parametrize(
    ("tokens", "running", "remote"),
    [(16, 0, False), (16, 60, True), (2000, 0, False), (2000, 2, True)],
)
def test_by_speed_prefill_goes_where_it_costs_least_time(
    tokens: int, running: int, remote: bool
) -> None:
    """On an idle decode worker nothing is in the way; next to many sequences all of them wait."""
    demand = replace(DEMAND, input_tokens=tokens)
    prefills = [measured("p", "prefill", free_blocks=1000)]
    decodes = [measured("d", running_sequences=running, free_blocks=1000)]
    decision = by_speed(demand, prefills, decodes)
    assert (decision.prefill is not None) is remote
    assert decision.local_s is not None and decision.remote_s is not None
    assert (decision.remote_s < decision.local_s) is remote


def test_a_long_queue_at_prefill_is_worth_disturbing_decode() -> None:
    decodes = [measured("d", running_sequences=4)]
    for waiting, remote in ((0, True), (100_000, False)):
        prefills = [measured("p", "prefill", waiting_tokens=waiting)]
        decision = by_speed(replace(DEMAND, input_tokens=800), prefills, decodes)
        assert (decision.prefill is not None) is remote


@pytest.mark.parametrize("unknown", ["prefill", "decode", "link"])
@pytest.mark.parametrize(("tokens", "remote"), [(32, False), (33, True)])
def test_while_a_speed_is_unknown_length_decides(unknown: str, tokens: int, remote: bool) -> None:
    slow_link = replace(SPEED, handover_s=0.0 if unknown == "link" else 5.0)
    prefill = UNMEASURED if unknown == "prefill" else SPEED
    decode = UNMEASURED if unknown == "decode" else slow_link
    decision = by_speed(
        replace(DEMAND, input_tokens=tokens),
        [measured("p", "prefill", prefill)],
        [measured("d", speed=decode)],
    )
    assert (decision.prefill is not None) is remote
    assert decision.local_s is None


def test_the_faster_worker_gets_the_longer_queue() -> None:
    slow = replace(SPEED, prefill_position_s=0.0008)
    demand = replace(DEMAND, needs_decode=False)
    for waiting, expected in ((2000, "fast"), (8000, "slow")):
        prefills = [
            measured("fast", "prefill", waiting_tokens=waiting, waiting_sequences=1),
            measured("slow", "prefill", slow, waiting_tokens=1000, waiting_sequences=1),
        ]
        decision = route(demand, prefills, [])
        assert decision.prefill is not None and decision.prefill.instance_id == expected


def test_one_without_a_speed_is_taken_for_a_middling_one() -> None:
    demand = replace(DEMAND, needs_decode=False)
    prefills = [
        measured("quick", "prefill", replace(SPEED, prefill_position_s=0.0001)),
        measured("middling", "prefill", waiting_tokens=100),
        measured("slow", "prefill", replace(SPEED, prefill_position_s=0.01)),
        measured("new", "prefill", UNMEASURED),
    ]
    decision = route(demand, prefills, [])
    costs = {c.identity.instance_id: c.cost.total for c in decision.candidates if c.cost}
    assert sorted(costs, key=costs.__getitem__) == ["quick", "new", "middling", "slow"]
    assert decision.first_token_s == pytest.approx(0.002 + 100 * 0.0001)


def test_who_has_not_decoded_yet_is_taken_for_no_faster() -> None:
    """Nor for slower: what is cached decides, though only one of them knows its steps."""
    demand = replace(DEMAND, input_tokens=520)
    for known in (SPEED, replace(UNMEASURED, step_s=0.3, row_s=0.001)):
        decodes = [
            replace(measured("knows", speed=known), number=0),
            replace(measured("new", speed=UNMEASURED), number=1),
        ]
        for holder in (0, 1):
            view = PoolSnapshot(decodes, Overlap(((8, 1 << holder),)))
            decision = decide(demand, PoolSnapshot([]), view, RoutingPolicy(0))
            assert decision.decode == decodes[holder].identity


def test_small_differences_between_steps_do_not_outweigh_what_is_cached() -> None:
    demand = replace(DEMAND, input_tokens=520)
    for slower, expected in ((1.1, "holds"), (3.0, "quick")):
        speed = replace(SPEED, step_s=slower * SPEED.step_s)
        decodes = [
            replace(measured("holds", speed=speed), number=0),
            replace(measured("quick"), number=1),
        ]
        for order in (decodes, decodes[::-1]):
            view = PoolSnapshot(order, Overlap(((8, 1),)))
            decision = decide(demand, PoolSnapshot([]), view, RoutingPolicy(0))
            assert decision.decode is not None and decision.decode.instance_id == expected


def test_a_new_workers_share_grows() -> None:
    """Placed one after the other, reports none: what the new one has of what the others have."""
    for age, share in ((0.0, 0.1), (5.0, 0.5), (20.0, 1.0)):
        decodes = {n: replace(worker(n), since=-100.0) for n in ("a", "b")}
        decodes["new"] = replace(worker("new"), since=-age)
        for number in range(300):
            decision = decide(
                replace(DEMAND, request_id=str(number), input_tokens=16),
                PoolSnapshot([]),
                PoolSnapshot(list(decodes.values())),
                RoutingPolicy(64, slow_start_s=10.0),
            )
            assert decision.decode is not None
            name = decision.decode.instance_id
            decodes[name] = replace(
                decodes[name],
                fresh_sequences=decodes[name].fresh_sequences + 1,
                fresh_tokens=decodes[name].fresh_tokens + 16,
            )
        old = (decodes["a"].fresh_sequences + decodes["b"].fresh_sequences) / 2
        assert decodes["new"].fresh_sequences / old == pytest.approx(share, abs=0.06)


def test_a_new_worker_gets_work_while_the_others_are_idle() -> None:
    """A pool that has little to do would else not try it before it is new no more."""
    prefills = [replace(measured(n, "prefill"), since=-100.0) for n in ("a", "b")]
    prefills.append(replace(measured("new", "prefill", speed=UNMEASURED), since=0.0))
    decodes = [replace(measured("x"), since=-100.0), replace(measured("new", speed=UNMEASURED))]
    given = [
        decide(
            replace(DEMAND, request_id=str(number), input_tokens=800),
            PoolSnapshot(prefills),
            PoolSnapshot(decodes),
            RoutingPolicy(64, slow_start_s=10.0),
            now=1.0,
        )
        for number in range(60)
    ]
    for chosen in ([each.prefill for each in given], [each.decode for each in given]):
        assert 10 < sum(one is not None and one.instance_id == "new" for one in chosen) < 45


def test_what_is_cached_counts_among_workers_that_are_all_new() -> None:
    """As much as later: the same requests after the router's start and in an hour."""
    for now in (0.5, 3600.0):
        prefills = [
            replace(measured(name, "prefill"), number=number, since=0.4)
            for number, name in enumerate(("holds", "idle"))
        ]
        prefills[0] = replace(prefills[0], placed_sequences=1, placed_tokens=100)
        decision = decide(
            replace(DEMAND, input_tokens=520),
            PoolSnapshot(prefills, Overlap(((8, 1),))),
            PoolSnapshot([measured("d")]),
            RoutingPolicy(0, slow_start_s=10.0),
            now=now,
        )
        assert decision.prefill is not None and decision.prefill.instance_id == "holds"


def test_old_reports_make_no_herd() -> None:
    """Each of three routers sees the same idle workers and only its own placements."""
    total = dict.fromkeys("abcd", 0)
    for router in range(3):
        decodes = {name: worker(name) for name in "abcd"}
        for number in range(40):
            demand = replace(DEMAND, request_id=f"{router}-{number}")
            decision = route(demand, [], list(decodes.values()))
            assert decision.decode is not None
            name = decision.decode.instance_id
            snapshot = decodes[name]
            decodes[name] = replace(snapshot, fresh_tokens=snapshot.fresh_tokens + 100)
            total[name] += 1
    assert set(total.values()) == {30}


def test_every_choice_can_be_explained() -> None:
    decodes = [measured("d", running_sequences=8), measured("e", state=WorkerState.DRAINING)]
    demand = replace(DEMAND, input_tokens=800)
    told = by_speed(demand, [measured("p", "prefill")], decodes).lines()
    assert told[0].startswith("prefill and decode apart: ")
    assert [line.split(": ")[1].split()[0] for line in told[1:]] == ["picked", "not", "picked"]
    for part in ("queue_s", "compute_s", "crowd_s", "harm_s", "shortage_s", "uncached_tokens 800"):
        assert part in told[1]
