"""TierIndex: what a tier keeps, against a model that only remembers what was added."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batonlm.core.kvcache.cache_events import Change
from batonlm.core.kvcache.prefix import UNIT_TOKENS, UnitName
from batonlm.core.kvcache.tier_index import TierIndex
from tests.depth import examples

SIZE = 10
TENANTS = [b"tenant a", b"tenant b", b"tenant c"]


def name(tenant: bytes, branch: int, depth: int) -> UnitName:
    """Of one of a tenant's prefixes, which part after their first two units."""

    def unit(depth: int) -> bytes:
        if depth < 0:
            return tenant
        return b"%s %d %d" % (tenant, branch if depth > 1 else 0, depth)

    return UnitName(unit(depth), unit(depth - 1), tenant, depth * UNIT_TOKENS)


NAMES = st.builds(name, st.sampled_from(TENANTS), st.integers(0, 2), st.integers(0, 5))


class IndexMachine(RuleBasedStateMachine):
    @initialize(room=st.integers(0, 12))
    def begin(self, room: int) -> None:
        self.room = room
        self.changes: deque[Change] = deque()
        self.reported: set[bytes] = set()
        self.index = TierIndex(room * SIZE + SIZE // 2, report=self.changes.append)
        self.kept: dict[bytes, UnitName] = {}

    @rule(one=NAMES)
    def add(self, one: UnitName) -> None:
        if one.unit in self.kept:
            return
        self.kept[one.unit] = one
        for gone in self.index.add(one, SIZE):
            del self.kept[gone.unit]
            assert all(left.parent != gone.unit for left in self.kept.values()), (
                "what lies behind it goes first"
            )
        tenants = {left.namespace for left in self.kept.values()}
        if len(tenants) > 1 and len(self.kept) == self.room > 1:
            # One unit that nobody else asked for may be above the half.
            assert self.index.num_bytes <= self.index.max_bytes

    @rule(one=NAMES)
    def use(self, one: UnitName) -> None:
        self.index.use(one.unit)

    @rule(one=NAMES)
    def remove(self, one: UnitName) -> None:
        self.index.remove(one.unit)
        self.kept.pop(one.unit, None)

    @invariant()
    def it_keeps_what_it_says(self) -> None:
        self.index.check()
        assert set(self.index) == set(self.kept.values())
        assert len(self.index) == len(self.kept) <= self.room
        assert self.index.num_bytes == SIZE * len(self.kept)

    @invariant()
    def what_can_be_found_is_reported_once(self) -> None:
        while self.changes:
            unit, came = self.changes.popleft()
            assert came != (unit in self.reported)
            (self.reported.add if came else self.reported.remove)(unit)

        def found(one: UnitName) -> bool:
            return one.first_position == 0 or (
                one.parent in self.kept and found(self.kept[one.parent])
            )

        assert self.reported == {one.unit for one in self.kept.values() if found(one)}


IndexMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, derandomize=True
)
TestIndex = IndexMachine.TestCase


def filled(room: int, *names: UnitName) -> TierIndex:
    index = TierIndex(room * SIZE)
    for one in names:
        index.add(one, SIZE)
    return index


def test_what_is_not_used_for_longest_goes_first() -> None:
    a, b = name(b"t", 0, 0), name(b"u", 0, 0)
    c = name(b"v", 0, 0)
    index = filled(2, a, b)
    index.use(a.unit)
    assert index.add(c, SIZE) == [b]


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    index = filled(3, *(name(b"t", 0, depth) for depth in range(3)))
    # The new one is of no use without those before it, and deeper.
    assert index.add(name(b"t", 1, 2), SIZE) == [name(b"t", 0, 2)]


def test_what_was_used_often_outlives_what_is_newer() -> None:
    hot = name(b"t", 0, 0)
    index = filled(2, hot)
    for _ in range(5):
        index.use(hot.unit)
    for number in range(4):
        index.add(name(b"u%d" % number, 0, 0), SIZE)
    assert hot.unit in index
    # But not forever: the clock goes on with each unit that goes.
    for number in range(20):
        index.add(name(b"w%d" % number, 0, 0), SIZE)
    assert hot.unit not in index


def test_what_is_dear_to_compute_outlives_what_is_cheap() -> None:
    deep = UnitName(b"deep", b"before it", b"t", 8192)
    cheap = UnitName(b"cheap", b"u", b"u", 0)
    index = filled(2, deep, cheap)
    assert index.add(UnitName(b"new", b"v", b"v", 0), SIZE) == [cheap]


def test_no_tenant_drives_out_the_others() -> None:
    quiet = [name(b"quiet", 0, depth) for depth in range(3)]
    index = filled(8, *quiet)
    for number in range(30):
        for depth in range(2):
            index.add(name(b"loud", number, depth + 2), SIZE)
    assert all(one.unit in index for one in quiet)
    index.check()


def test_of_many_tenants_what_is_not_used_for_longest_goes() -> None:
    """Clients choose their salts."""
    many = [name(b"tenant %d" % number, 0, 0) for number in range(500)]
    index = filled(400, *many[:400])
    for used in many[:100]:
        index.use(used.unit)
    for number, one in enumerate(many[400:]):
        assert index.add(one, SIZE) == [many[100 + number]]
    index.check()
    large = [name(b"large", 0, depth) for depth in range(250)]
    for one in large:
        gone = index.add(one, SIZE)
    assert gone[0].namespace == b"large", "its own, above half"
    index.check()


def test_a_ring_of_names_ends() -> None:
    """Headers in a folder are not verified before they are read."""
    index = filled(2, UnitName(b"a", b"b", b"t", 64), UnitName(b"b", b"a", b"t", 64))
    assert index.add(UnitName(b"c", b"a", b"t", 64), SIZE)
    index.check()
