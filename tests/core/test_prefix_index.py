"""PrefixIndex against sets: it holds what workers told it, within its bounds, and says when not."""

from __future__ import annotations

import random
from collections import deque
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonlm.core.kvcache import cache_events
from batonlm.core.kvcache.cache_events import CacheBatch, CacheLog, CacheReader, Change
from batonlm.core.kvcache.prefix import HASH_BYTES
from batonlm.core.routing.prefix_index import NO_OVERLAP, Overlap, PrefixIndex
from tests.depth import examples

DEPTH = 6
CHAINS = tuple(
    tuple(bytes([chain, depth]) * (HASH_BYTES // 2) for depth in range(DEPTH))
    for chain in range(1, 4)
)


def held(units: set[bytes], chain: tuple[bytes, ...], gaps: bool) -> int:
    """How many units from its start on are here; with gaps, up to the last one that is."""
    if gaps:
        return max((n for n, unit in enumerate(chain, 1) if unit in units), default=0)
    return next((n for n, unit in enumerate(chain) if unit not in units), len(chain))


class Cache:
    """A worker's cache of beginnings, its log, and a reader that may lose batches. gaps: it tells
    the ends of beginnings alone."""

    def __init__(self, gaps: bool) -> None:
        self.gaps = gaps
        self.units: set[bytes] = set()
        self._changes: deque[Change] = deque()
        self._log = CacheLog(self._changes, max_kept=8)
        self.reader = CacheReader(self._log)

    def reach(self, chain: tuple[bytes, ...], units: int) -> None:
        """Makes it hold so many of a chain's units; or, with gaps, every other of them."""
        wanted = chain[:units][:: -2 if self.gaps else 1]
        for unit in wanted:
            if unit not in self.units:
                self._changes.append((unit, True))
        for unit in reversed(chain):
            if unit in self.units and unit not in wanted:
                self._changes.append((unit, False))
        self.units = (self.units - set(chain)) | set(wanted)

    def watch_again(self) -> None:
        self.reader = CacheReader(self._log)


class Index(RuleBasedStateMachine):
    """Workers come and go, their caches change, events get lost: never more is found than is there,
    and once all is read, exactly what is there, if there was room for it."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.each = 40, 20
        self.index = PrefixIndex(self.entries, self.each)
        self.caches: dict[int, Cache] = {}
        self.behind: set[int] = set()
        self.lost: set[int] = set()
        """Of which something was lost, and nothing came since that would show it."""
        self.squeezed: set[int] = set()
        """Whose share was too small for all they might hold, since they last told all of it."""

    @property
    def roomy(self) -> bool:
        share = min(self.each, self.entries // max(1, len(self.caches)))
        return share >= DEPTH * len(CHAINS)

    @precondition(lambda self: len(self.caches) < 5)
    @rule(gaps=st.booleans())
    def comes(self, gaps: bool) -> None:
        number = self.index.join(gaps=gaps)
        assert number == min(set(range(6)) - self.caches.keys())
        self.caches[number] = Cache(gaps)
        self.behind.add(number)
        if not self.roomy:
            self.squeezed = set(self.caches)

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        number = self._some(data)
        self.index.leave(number)
        del self.caches[number]
        self.behind.discard(number)
        self.lost.discard(number)
        self.squeezed.discard(number)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), chain=st.sampled_from(CHAINS), units=st.integers(0, DEPTH))
    def changes(self, data: st.DataObject, chain: tuple[bytes, ...], units: int) -> None:
        number = self._some(data)
        self.caches[number].reach(chain, units)
        self.behind.add(number)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), batch=st.integers(1, 4))
    def tells(self, data: st.DataObject, batch: int) -> None:
        number = self._some(data)
        cache = self.caches[number]
        with patch.object(cache_events, "BATCH_UNITS", batch):
            parts = cache.reader.read()
            while not all([self.index.apply(number, part) for part in parts]):
                cache.watch_again()
                parts = cache.reader.read()
        if parts:
            self.lost.discard(number)
        if number not in self.lost:
            self.behind.discard(number)
        if parts and parts[0].snapshot and self.roomy:
            self.squeezed.discard(number)

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def loses(self, data: st.DataObject) -> None:
        """What is read does not arrive, unless it was a snapshot, which begins a stream."""
        number = self._some(data)
        for part in self.caches[number].reader.read():
            if part.snapshot:
                self.index.apply(number, part)
            else:
                self.behind.add(number)
                self.lost.add(number)

    @invariant()
    def holds_together(self) -> None:
        self.index.check()
        assert len(self.index) <= self.entries
        for chain in CHAINS:
            found = self.index.find(b"".join(chain))
            assert [units for units, _ in found.groups] == sorted(
                {units for units, _ in found.groups}, reverse=True
            )
            for number, cache in self.caches.items():
                if number not in self.behind:
                    there = held(cache.units, chain, cache.gaps)
                    assert found.units(number) <= there
                    if number not in self.squeezed:
                        assert found.units(number) == there

    def _some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.caches)))


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=examples(60), stateful_step_count=40)


def full(units: int, salt: int = 0) -> list[bytes]:
    draw = random.Random(salt)
    return [draw.randbytes(HASH_BYTES) for _ in range(units)]


def told(index: PrefixIndex, units: list[bytes]) -> int:
    number = index.join()
    assert index.apply(number, CacheBatch(0, b"".join(units), snapshot=True))
    return number


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 40))
def test_every_worker_is_found_with_its_own_length(lengths: list[int], asked: int) -> None:
    index, chain = PrefixIndex(), full(40)
    numbers = [told(index, chain[:length]) for length in lengths]
    found = index.find(b"".join(chain[:asked]))
    assert [found.units(n) for n in numbers] == [min(length, asked) for length in lengths]
    assert found.units(-1) == 0


def test_a_gap_forgets_the_worker_until_its_next_snapshot() -> None:
    index, chain = PrefixIndex(), full(4)
    one, other = told(index, chain[:2]), told(index, chain)
    whole = b"".join(chain)
    assert not index.apply(one, CacheBatch(1, chain[3]))
    assert index.gaps == 1
    assert (index.find(whole).units(one), index.find(whole).units(other)) == (0, 4)
    assert not index.apply(one, CacheBatch(2, chain[2])), "its numbers mean nothing now"
    assert index.apply(one, CacheBatch(7, chain[0] + chain[1], snapshot=True))
    assert index.apply(one, CacheBatch(7, chain[2]))
    assert index.find(whole).units(one) == 3


def test_a_snapshot_replaces_what_was_known() -> None:
    index, chain = PrefixIndex(), full(4)
    one = told(index, chain)
    assert index.apply(one, CacheBatch(5, chain[0], snapshot=True))
    assert index.apply(one, CacheBatch(5, chain[1], snapshot=True)), "its second part"
    assert index.find(b"".join(chain)).units(one) == 2
    index.check()


def test_a_worker_that_leaves_takes_everything_along() -> None:
    index, chain = PrefixIndex(), full(30)
    numbers = [told(index, chain) for _ in range(3)]
    for number in numbers:
        index.leave(number)
    assert len(index) == 0
    assert index.find(b"".join(chain)) == NO_OVERLAP
    index.check()
    assert index.join() == 0


def test_a_full_index_keeps_beginnings_in_equal_shares() -> None:
    index = PrefixIndex(max_entries=120, max_per_worker=60)
    chains = [full(100, salt) for salt in range(4)]
    for workers, share in ((1, 60), (2, 60), (3, 40), (4, 30)):
        told(index, chains[workers - 1])
        index.check()
        for number in range(workers):
            assert index.find(b"".join(chains[number])).units(number) == share


def test_those_that_hold_most_come_first_from_anywhere_on() -> None:
    index, chain = PrefixIndex(), full(3)
    deep = [told(index, chain) for _ in range(4)]
    told(index, chain[:1])
    found = index.find(b"".join(chain))
    assert found.most(4, 0) == set(deep)
    assert found.most(2, 2) == {2, 3}
    assert found.most(2, 3) == {3, 0}
    assert len(found.most(9, 1)) == 5
    assert Overlap().most(3, 0) == set()
