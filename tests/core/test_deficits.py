"""Deficits: two tenants that always have work get what their weights say, whatever it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.scheduler.deficits import Deficits

QUANTUM = 100.0
COSTS = st.lists(st.integers(1, 400), min_size=1, max_size=8)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 5.0])


@given(st.lists(st.tuples(WEIGHTS, COSTS), min_size=2, max_size=5), st.integers(20, 200))
def test_shares_follow_weights_within_a_turn(
    tenants: list[tuple[float, list[int]]], services: int
) -> None:
    deficits = Deficits(QUANTUM)
    served = dict.fromkeys(map(str, range(len(tenants))), 0.0)
    for name, (weight, _) in zip(served, tenants, strict=True):
        deficits.join(name, weight)
    for number in range(services):
        name = deficits.order()[0]
        costs = tenants[int(name)][1]
        cost = costs[number % len(costs)]
        deficits.charge(name, cost)
        served[name] += cost
    normal = [served[name] / tenants[int(name)][0] for name in served]
    slack = max(max(costs) / weight for weight, costs in tenants)
    assert max(normal) - min(normal) <= QUANTUM + 2 * slack + 1e-6


def test_coming_and_going_is_no_way_to_be_first() -> None:
    deficits = Deficits(QUANTUM)
    deficits.join("stays", 1.0)
    served = {"stays": 0, "flickers": 0}
    for _ in range(50):
        deficits.join("flickers", 1.0)
        name = deficits.order()[0]
        deficits.charge(name, 150)
        served[name] += 1
        deficits.leave("flickers")
    assert served["flickers"] <= served["stays"] + 1


def test_one_alone_owes_nobody() -> None:
    deficits = Deficits(QUANTUM)
    deficits.join("alone", 1.0)
    for _ in range(100):
        deficits.charge("alone", 1000)
    deficits.leave("alone")
    deficits.join("new", 1.0)
    deficits.join("alone", 1.0)
    assert deficits.order() == ["new", "alone"]
    deficits.charge("new", 200)
    assert deficits.order()[0] == "alone"


def test_what_was_charged_too_much_is_given_back() -> None:
    deficits = Deficits(QUANTUM)
    for name in "ab":
        deficits.join(name, 1.0)
    deficits.charge("a", 1000)
    deficits.give_back("a", 1000)
    deficits.charge("b", 100)
    assert deficits.order()[0] == "a"


def test_a_copy_is_another_one() -> None:
    deficits = Deficits(QUANTUM)
    deficits.join("a", 1.0)
    deficits.join("b", 1.0)
    before = deficits.order()
    trial = deficits.copy()
    trial.charge(before[0], 500)
    assert trial.order() != before
    assert deficits.order() == before
