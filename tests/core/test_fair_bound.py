"""What is shared under one bound: whatever others do, a caller that holds little is let in."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonlm.core.admission.admission import FairBound
from tests.depth import examples

MOST, LARGEST = 3200, 100
STEP = 16
GREEDY = ("a", "b", "c")


class FairBoundMachine(RuleBasedStateMachine):
    """Three that take all they get and give some back, in any order, beside a polite one."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.bound = FairBound(self.factor)
        self.taken: dict[str, list[int]] = {name: [] for name in (*GREEDY, "polite")}
        self.free_of_them = MOST / (1 + self.factor) ** len(GREEDY) - LARGEST / self.factor

    def take(self, caller: str, amount: int) -> bool:
        if not self.bound.has_room(caller, 1.0, amount, MOST):
            return False
        self.bound.take(caller, 1.0, amount)
        self.taken[caller].append(amount)
        return True

    @rule(caller=st.sampled_from(GREEDY), amount=st.integers(1, LARGEST))
    def take_some(self, caller: str, amount: int) -> None:
        self.take(caller, amount)

    @rule(caller=st.sampled_from(GREEDY), amount=st.integers(1, LARGEST))
    def take_all_there_is(self, caller: str, amount: int) -> None:
        while self.take(caller, amount):
            pass

    @precondition(lambda self: any(self.taken.values()))
    @rule(data=st.data(), all_of_it=st.booleans())
    def give_back(self, data: st.DataObject, all_of_it: bool) -> None:
        caller = data.draw(st.sampled_from([name for name, held in self.taken.items() if held]))
        for _ in range(len(self.taken[caller]) if all_of_it else 1):
            self.bound.give_back(caller, self.taken[caller].pop(0))

    @rule(data=st.data())
    def a_polite_one_asks(self, data: st.DataObject) -> None:
        share = int(self.free_of_them * self.factor / (1 + self.factor))
        left = share - sum(self.taken["polite"])
        if left > 0:
            amount = data.draw(st.integers(1, min(left, LARGEST)))
            assert self.take("polite", amount), "it was refused because of others"

    @invariant()
    def books_agree(self) -> None:
        held = {name: sum(amounts) for name, amounts in self.taken.items()}
        assert {name: self.bound.held(name) for name in held} == held
        assert self.bound.total == sum(held.values()) <= MOST
        assert MOST - self.bound.total + held["polite"] >= self.free_of_them


class EasyMachine(FairBoundMachine):
    factor = 1.5


for machine in (FairBoundMachine, EasyMachine):
    machine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=30)
TestEqualParts: Any = FairBoundMachine.TestCase
TestMoreForOneAlone: Any = EasyMachine.TestCase


def filled(*callers: tuple[str, float], factor: float = 1.0, rounds: int = 40) -> FairBound:
    """By callers of these weights, who give back the older half of what they hold and take all
    they get, in turns."""
    bound = FairBound(factor)
    for _ in range(rounds):
        for name, weight in callers:
            bound.give_back(name, bound.held(name) // 2)
            while bound.has_room(name, weight, STEP, MOST):
                bound.take(name, weight, STEP)
    return bound


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=4))
def test_greedy_ones_get_their_weights_shares(weights: list[float]) -> None:
    callers = [(str(number), weight) for number, weight in enumerate(weights)]
    bound = filled(*callers)
    heaviest = max(weights)
    free = MOST - bound.total
    for name, weight in callers:
        assert abs(bound.held(name) - free * weight / heaviest) <= 0.05 * MOST


def test_one_alone_gets_its_factors_part_and_the_next_one_is_let_in_at_once() -> None:
    for factor, part in ((1.0, 1 / 2), (3.0, 3 / 4)):
        bound = filled(("a", 1.0), factor=factor, rounds=1)
        assert abs(bound.held("a") - part * MOST) <= STEP
        assert bound.has_room("b", 1.0, LARGEST, MOST)
        bound.take("b", 1.0, LARGEST)
        assert bound.has_room("b", 1.0, LARGEST, MOST)
        assert not bound.has_room("a", 1.0, 1, MOST), "it waits until its share is larger again"


def test_one_alone_is_let_in_whatever_its_size() -> None:
    bound = FairBound(1.0)
    assert bound.has_room("a", 1.0, 2 * MOST, MOST)
    bound.take("a", 1.0, 2 * MOST)
    assert not bound.has_room("b", 1.0, 1, MOST)


def test_who_has_nobody_to_share_with_may_have_all() -> None:
    bound = filled(("", 1.0), rounds=1)
    assert bound.total == MOST
