"""Whoever replays a cache's log from anywhere holds what the cache holds, or knows of a gap."""

from __future__ import annotations

import random
from collections import deque
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.kvcache import cache_events
from batonlm.core.kvcache.block_pool import BlockPool, BlockTable
from batonlm.core.kvcache.cache_events import CacheBatch, CacheLog, CacheReader, Change
from batonlm.core.kvcache.prefix import HASH_BYTES, PrefixChain, namespace, prefix_hashes
from tests.core.cache_replica import CacheReplica, hashes

UNITS = [bytes([number]) * HASH_BYTES for number in range(6)]


class Cache:
    """A set of units that come and go, and its log."""

    def __init__(self, max_kept: int = 5) -> None:
        self.units: set[bytes] = set()
        self._changes: deque[Change] = deque()
        self.log = CacheLog(self._changes, max_kept=max_kept)

    def toggle(self, unit: bytes) -> None:
        self._changes.append((unit, unit not in self.units))
        self.units ^= {unit}


@given(
    moves=st.lists(
        st.one_of(st.sampled_from(UNITS), st.sampled_from(["read 0", "read 1", "collect"])),
        max_size=60,
    ),
    batch=st.integers(1, 4),
)
def test_readers_that_read_now_and_then_hold_what_is_there(
    moves: list[bytes | str], batch: int
) -> None:
    cache = Cache()
    readers = [(CacheReader(cache.log), CacheReplica()) for _ in range(2)]
    with patch.object(cache_events, "BATCH_UNITS", batch):
        for move in moves:
            if isinstance(move, bytes):
                cache.toggle(move)
            elif move == "collect":
                cache.log.collect()
            else:
                reader, replica = readers[int(move[-1])]
                for part in reader.read():
                    assert len(part.added) + len(part.removed) <= batch * HASH_BYTES
                    assert not set(hashes(part.added)) & set(hashes(part.removed))
                    assert replica.apply(part)
                assert replica.units == cache.units


@given(
    before=st.lists(st.sampled_from(UNITS), max_size=10),
    after=st.lists(
        st.lists(st.sampled_from(UNITS), min_size=1, max_size=4), min_size=2, max_size=5
    ),
    data=st.data(),
)
def test_a_lost_batch_is_noticed_by_the_next_one(
    before: list[bytes], after: list[list[bytes]], data: st.DataObject
) -> None:
    cache = Cache(max_kept=100)
    for unit in before:
        cache.toggle(unit)
    reader = CacheReader(cache.log)
    batches = reader.read()
    for units in after:
        for unit in units:
            cache.toggle(unit)
        batches += reader.read()
    lost = data.draw(st.integers(1, len(batches) - 2))
    replica = CacheReplica()
    assert all(replica.apply(batch) for batch in batches[:lost])
    assert not replica.apply(batches[lost + 1])


def test_a_snapshot_says_even_that_there_is_nothing() -> None:
    assert CacheReader(Cache().log).read() == [CacheBatch(0, snapshot=True)]


def test_a_snapshot_tells_units_in_the_order_of_their_coming() -> None:
    """So that whoever keeps only some of it keeps beginnings."""
    cache = Cache()
    for unit in (UNITS[3], UNITS[5], UNITS[0], UNITS[5], UNITS[1], UNITS[5]):
        cache.toggle(unit)
    (snapshot,) = CacheReader(cache.log).read()
    assert hashes(snapshot.added) == [UNITS[3], UNITS[0], UNITS[1], UNITS[5]]


def test_leading_units_end_at_the_first_that_is_missing() -> None:
    cache = Cache()
    for unit in (UNITS[0], UNITS[1], UNITS[3]):
        cache.toggle(unit)
    cache.log.collect()
    assert cache.log.num_leading(UNITS) == 2
    assert cache.log.num_leading(UNITS[2:]) == 0


def test_nothing_new_is_nothing_to_read() -> None:
    cache = Cache()
    reader = CacheReader(cache.log)
    reader.read()
    assert reader.read() == []
    cache.toggle(UNITS[0])
    assert reader.read() == [CacheBatch(0, added=UNITS[0])]
    assert reader.read() == []


def test_a_reader_that_fell_behind_gets_a_snapshot_again() -> None:
    cache, replica = Cache(max_kept=5), CacheReplica()
    reader = CacheReader(cache.log)
    for batch in reader.read():
        replica.apply(batch)
    for unit in UNITS:
        cache.toggle(unit)
    (batch,) = reader.read()
    assert batch.snapshot and batch.first_number == batch.next_number == 6
    replica.apply(batch)
    assert replica.units == cache.units
    cache.toggle(UNITS[0])
    assert [b.first_number for b in reader.read()] == [6]


def test_a_large_snapshot_comes_in_parts_of_64_kib() -> None:
    changes: deque[Change] = deque(
        (number.to_bytes(HASH_BYTES, "little"), True) for number in range(10_000)
    )
    parts = CacheReader(CacheLog(changes)).read()
    assert [len(part.added) for part in parts] == [65536, 65536, 10_000 * HASH_BYTES - 131072]
    assert {part.first_number for part in parts} == {10_000}


@pytest.mark.parametrize("size", [16, 48, 128])
def test_a_pools_log_is_what_its_prefix_cache_holds(size: int) -> None:
    """Prompts share beginnings, and the pool is far too small for them."""
    numbers = random.Random(size)
    changes: deque[Change] = deque()
    pool = BlockPool(1024 // size, size, changes.append)
    reader, replica = CacheReader(CacheLog(changes, max_kept=40)), CacheReplica()
    held: list[tuple[BlockTable, list[int]]] = []
    hits = 0
    for _ in range(300):
        if held and numbers.random() < 0.5:
            table, _ = held.pop(numbers.randrange(len(held)))
            pool.release(table)
        else:
            shared = numbers.randrange(0, 600, 100)
            tokens = [1] * shared + [numbers.randrange(3)] * numbers.randrange(20, 300)
            chain = PrefixChain(namespace(b"", "m"), namespace(b"", "t"), size)
            count = len(tokens) // size
            chain.extend(tokens, count)
            taken = pool.allocate(count, chain, count)
            if taken is not None:
                hits += taken.num_cached
                pool.publish(taken, chain, count)
                held.append((taken, tokens))
        pool.check()
        if numbers.random() < 0.3:
            assert all(replica.apply(batch) for batch in reader.read())
            for _, tokens in held:
                full = tokens[: len(tokens) // size * size]
                assert set(hashes(prefix_hashes(full, b"", "t"))) <= replica.units
    assert hits > 100
