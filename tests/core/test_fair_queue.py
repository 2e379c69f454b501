"""FairQueue under any order of calls: its order rules, its bounds, and no book is left open."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonlm.core.admission.fair_queue import Entry, FairQueue
from tests.depth import examples

MAX_TOKENS, MAX_ENTRIES = 1000, 12


class FairQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(
            max_tokens=MAX_TOKENS, max_entries=MAX_ENTRIES, quantum=50
        )
        self.inside: list[Entry[int]] = []
        self.passed: dict[int, int] = {}
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        tokens=st.integers(1, 300),
        deadline=st.one_of(st.just(math.inf), st.floats(0, 100)),
        resumed=st.booleans(),
        group=st.sampled_from("xy"),
    )
    def add(
        self, tenant: str, priority: int, tokens: int, deadline: float, resumed: bool, group: str
    ) -> None:
        self.now += 1.0
        if not resumed and not self.queue.has_room(tenant, tokens):
            return
        entry = Entry(0, tenant, 1.0, priority, tokens, self.now, deadline, resumed, group)
        self.queue.add(entry)
        self.inside.append(entry)
        self.passed[entry.number] = 0

    @precondition(lambda self: self.inside)
    @rule()
    def serve(self) -> None:
        entry = self.queue.heads()[0]
        assert entry.class_ == min(other.class_ for other in self.inside)
        own = [e for e in self.inside if (e.tenant, e.class_) == (entry.tenant, entry.class_)]
        assert entry.rank == min(other.rank for other in own)
        self.queue.remove(entry, served=True)
        self.inside.remove(entry)
        del self.passed[entry.number]
        heads = (
            {each[0].number for each in self.queue.classes[entry.class_].entries.values()}
            if (entry.class_ in self.queue.classes)
            else set()
        )
        for number in self.passed:
            self.passed[number] = self.passed[number] + 1 if number in heads else 0
            # Costs are at most 300 and a turn is 50: nobody is passed over for longer than two
            # others take to pay for one of theirs.
            assert self.passed[number] <= 2 * (2 * 300 + 50)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.inside))
        self.queue.remove(entry, served=False)
        self.inside.remove(entry)
        del self.passed[entry.number]

    @rule(tenant=st.sampled_from("abc"), unused=st.integers(-200, 200))
    def settle(self, tenant: str, unused: int) -> None:
        self.queue.settle(tenant, 0, unused)

    @rule(tenant=st.sampled_from("abcd"), priority=st.integers(-1, 1))
    def foresee(self, tenant: str, priority: int) -> None:
        ahead = self.queue.ahead(tenant, 1.0, priority)
        counted = [e for e in self.inside if e.class_ <= (True, priority)]
        assert 0 <= ahead <= sum(entry.tokens for entry in counted)

    @invariant()
    def books_agree(self) -> None:
        bounded = [entry for entry in self.inside if not entry.resumed]
        assert len(self.queue) == len(self.inside)
        assert self.queue.num_bounded == len(bounded) <= MAX_ENTRIES
        assert self.queue.tokens == sum(entry.tokens for entry in bounded)
        assert self.queue.tokens <= MAX_TOKENS or len(bounded) == 1
        assert sorted(e.number for e in self.queue) == sorted(e.number for e in self.inside)
        firsts: dict[object, Entry[int]] = {}
        for one in sorted(self.inside, key=lambda each: each.rank):
            firsts.setdefault((one.class_, one.tenant, one.group), one)
        assert {head.number for head in self.queue.heads()} == {e.number for e in firsts.values()}
        assert self.queue.has_idle("xy") == ({e.group for e in self.inside} != {"x", "y"})
        if not self.inside:
            assert not self.queue.classes


FairQueueMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestFairQueue = FairQueueMachine.TestCase


def filled(*entries: Entry[int]) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue(max_tokens=10**6, max_entries=1000, quantum=100)
    for entry in entries:
        queue.add(entry)
    return queue


def entry(tenant: str, tokens: int = 100, arrived: float = 0.0, **more: object) -> Entry[int]:
    fields: dict[str, object] = {"weight": 1.0, "priority": 0, **more}
    return Entry(0, tenant, tokens=tokens, arrived=arrived, **fields)  # type: ignore[arg-type]


@given(st.permutations(range(4)))
def test_class_then_tenant_then_deadline_then_arrival(order: list[int]) -> None:
    entries = [
        entry("a", arrived=0.0, priority=-1, deadline=50.0),
        entry("b", arrived=1.0, deadline=10.0),
        entry("b", arrived=0.0, deadline=20.0),
        entry("a", arrived=2.0, resumed=True, priority=5),
    ]
    queue = filled(*(entries[i] for i in order))
    served = []
    while len(queue):
        served.append(queue.heads()[0])
        queue.remove(served[-1], served=True)
    assert served == [entries[3], entries[0], entries[1], entries[2]]


def test_a_group_passes_what_its_tenant_has_waiting_for_another() -> None:
    entries = [
        entry("a", arrived=0.0, group="busy"),
        entry("a", arrived=1.0, group="busy"),
        entry("a", arrived=2.0, group="free"),
        entry("b", arrived=3.0, group="busy"),
        entry("b", arrived=4.0, group="free", resumed=True),
    ]
    queue = filled(*entries)
    heads = [entries[4], entries[0], entries[2], entries[3]]
    assert queue.heads() == heads
    assert queue.has_idle(["busy", "other"]) and not queue.has_idle(["busy", "free"])
    for one in (entries[2], entries[4]):
        queue.remove(one, served=True)
    assert queue.has_idle(["free"]) and not queue.has_idle(["busy"]) and not queue.has_idle([])
    assert sorted(head.number for head in queue.heads()) == [0, 3]


def test_a_flood_leaves_room_for_others() -> None:
    queue: FairQueue[int] = FairQueue(max_tokens=1000, max_entries=100)
    while queue.has_room("flood", 10):
        queue.add(entry("flood", 10))
    assert queue.tokens == 500
    assert queue.has_room("other", 250)
    queue.add(entry("other", 250))
    assert queue.has_room("third", 125)


def test_who_waits_behind_a_flood_is_foretold_its_own_share_only() -> None:
    queue = filled(*(entry("flood", 100) for _ in range(50)))
    assert queue.ahead("flood", 1.0, 0) == 5000
    assert queue.ahead("other", 1.0, 0) == 100
    assert queue.ahead("other", 2.0, 0) == 100
    assert queue.ahead("other", 1.0, 1) == 5000
    assert queue.ahead("other", 1.0, -1) == 0


def test_the_hopeless_are_those_that_the_rate_cannot_serve_in_time() -> None:
    waiting = [entry("a", 100, arrived=float(i)) for i in range(5)]
    queue = filled(*waiting)

    def wait_s(tokens: float) -> float:
        return tokens / 100

    # Each takes a second, and may wait for two and a half after its arrival.
    late = queue.hopeless(wait_s, lambda e: e.arrived + 2.5, now=4.0)
    assert late == waiting[:2]
    assert queue.hopeless(wait_s, lambda e: 100.0, now=4.0) == []
    late = queue.hopeless(wait_s, lambda e: 6.0, now=4.0)
    assert late == waiting[3:]


def test_what_goes_on_is_never_hopeless() -> None:
    queue = filled(entry("a", resumed=True))
    assert queue.hopeless(lambda tokens: math.inf, lambda e: 0.0, now=100.0) == []
