"""BlockPool against a model that keeps the memory's contents, and its promises one by one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.block_pool import BlockPool, InvariantBroken
from baton.core.blocks import BlockTable, blocks_for
from baton.core.prefix import PrefixChain, namespace

SIZE = 4


def chain_of(tokens: list[int], salt: bytes = b"") -> PrefixChain:
    chain = PrefixChain(namespace(salt, "model"), namespace(salt, "tokenizer"), SIZE)
    chain.extend(tokens, len(tokens) // SIZE)
    return chain


def computed(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table whose full blocks are published."""
    table = pool.allocate(blocks_for(len(tokens), SIZE))
    assert table is not None
    pool.publish(table, chain_of(tokens, salt), len(tokens) // SIZE)
    return table


def allocated(pool: BlockPool, num_blocks: int) -> BlockTable:
    table = pool.allocate(num_blocks)
    assert table is not None
    return table


def test_blocks_are_one_run_where_possible() -> None:
    pool = BlockPool(16, SIZE)
    tables = [allocated(pool, 4) for _ in range(4)]
    pool.release(tables[1])
    pool.release(tables[3])
    small = allocated(pool, 2)
    assert small.extents == ((4, 2),)
    assert allocated(pool, 4).extents == ((12, 4),)
    pool.check()


def test_scattered_blocks_come_in_the_fewest_runs() -> None:
    pool = BlockPool(12, SIZE)
    tables = [allocated(pool, 1) for _ in range(12)]
    for index in (1, 3, 4, 5, 7, 9, 10):
        pool.release(tables[index])
    table = allocated(pool, 5)
    assert sorted(table.extents) == [(3, 3), (9, 2)]
    pool.check()


def test_a_table_grows_in_place_or_where_there_is_room() -> None:
    pool = BlockPool(32, SIZE)
    first, second = allocated(pool, 2), allocated(pool, 2)
    hole = allocated(pool, 2)
    allocated(pool, 1)
    pool.release(hole)
    assert pool.grow(second)
    assert second.extents == ((2, 3),)
    assert pool.grow(first)
    assert first.extents == ((0, 2), (7, 1)), "not into the hole, where it could not go on"
    assert pool.grow(first)
    assert first.extents == ((0, 2), (7, 2))
    pool.check()


def test_extents_are_made_once_between_two_growths() -> None:
    pool = BlockPool(8, SIZE)
    table = allocated(pool, 2)
    assert table.extents is table.extents
    before = table.extents
    pool.grow(table)
    assert table.extents == ((0, 3),) and before == ((0, 2),)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(8, SIZE)
    kept = computed(pool, list(range(8)))
    pool.release(kept)
    assert pool.num_free == 8
    assert pool.allocate(9) is None
    assert pool.allocate(6, keep_free=3) is None
    assert pool.allocate(3, chain_of(list(range(8))), 2, keep_free=6) is None
    assert pool.num_free == 8
    again = pool.allocate(3, chain_of(list(range(8))), 2, keep_free=5)
    assert again is not None and again.num_cached == 2


def test_releasing_twice_raises() -> None:
    pool = BlockPool(4, SIZE)
    table = allocated(pool, 2)
    pool.release(table)
    with pytest.raises(RuntimeError):
        pool.release(table)
    pool.check()
    assert pool.num_free == 4


def test_a_prefix_is_found_only_under_its_own_salt() -> None:
    pool = BlockPool(16, SIZE)
    tokens = list(range(10))
    pool.release(computed(pool, tokens, b"alice"))
    other = pool.allocate(3, chain_of(tokens, b"bob"), 2)
    own = pool.allocate(3, chain_of(tokens, b"alice"), 2)
    assert other is not None and other.num_cached == 0
    assert own is not None and own.num_cached == 2
    assert not set(own.blocks) & set(other.blocks)


def test_tokens_are_compared_on_a_hit() -> None:
    pool = BlockPool(16, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4]))
    forged = chain_of([5, 6, 7, 8])
    forged.links[0] = forged.links[0]._replace(digest=chain_of([1, 2, 3, 4]).links[0].digest)
    table = pool.allocate(1, forged, 1)
    assert table is not None and table.num_cached == 0


def test_the_oldest_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(6, SIZE)
    old, new = list(range(12)), list(range(100, 112))
    pool.release(computed(pool, old))
    pool.release(computed(pool, new))
    assert pool.num_free == 6
    pool.release(allocated(pool, 2))
    for tokens, cached in ((old, 1), (new, 3)):
        table = pool.allocate(3, chain_of(tokens), 3)
        assert table is not None and table.num_cached == cached
    pool.check()


def test_blocks_return_when_the_newest_step_launched_before_the_free_is_done() -> None:
    pool = BlockPool(8, SIZE)
    table = allocated(pool, 4)
    pool.launched(1)
    pool.launched(2)
    pool.release(table)
    assert pool.num_free == 4
    pool.completed(1)
    assert pool.num_free == 4
    pool.launched(3)
    pool.completed(2)
    assert pool.num_free == 8, "step 3 was launched after the free and cannot touch them"
    pool.completed(3)
    pool.check()


def test_steps_are_launched_and_completed_in_order() -> None:
    pool = BlockPool(8, SIZE)
    with pytest.raises(ValueError, match="not in flight"):
        pool.completed(1)
    pool.launched(2)
    with pytest.raises(ValueError, match="after step 2"):
        pool.launched(2)
    pool.completed(2)
    with pytest.raises(ValueError, match="not in flight"):
        pool.completed(2)


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    pool = BlockPool(16, SIZE)
    parent = allocated(pool, 3)
    child = pool.fork(parent, 10, 4)
    assert child is not None and child.copy is not None
    assert child.blocks[:2] == parent.blocks[:2]
    assert not set(child.blocks[2:]) & set(parent.blocks)
    assert (child.copy.source, child.copy.target) == (parent.blocks[2], child.blocks[2])
    assert child.copy.num_positions == 2
    aligned = pool.fork(parent, 8, 3)
    assert aligned is not None and aligned.copy is None
    assert pool.fork(parent, 10, 16) is None
    with pytest.raises(ValueError):
        pool.fork(parent, 10, 2)
    pool.check()


def test_the_source_of_a_copy_outlives_its_table_until_the_copying_step_is_done() -> None:
    pool = BlockPool(4, SIZE)
    parent = allocated(pool, 1)
    child = pool.fork(parent, 2, 1)
    assert child is not None
    source = parent.blocks[0]
    pool.release(parent)
    assert pool.num_free == 2
    copy = pool.claim_copy(child)
    assert copy is not None and copy.source == source
    assert pool.claim_copy(child) is None
    pool.launched(1)
    assert pool.num_free == 2
    pool.completed(1)
    assert pool.num_free == 3
    pool.check()


def test_a_fork_that_is_released_needs_no_copy() -> None:
    pool = BlockPool(4, SIZE)
    parent = allocated(pool, 1)
    child = pool.fork(parent, 2, 1)
    assert child is not None
    pool.release(child)
    pool.release(parent)
    assert pool.num_free == 4
    pool.check()


def test_check_notices_broken_books() -> None:
    pool = BlockPool(4, SIZE)
    table = allocated(pool, 2)
    pool.check()
    table.extend([3])
    with pytest.raises(InvariantBroken):
        pool.check()


@dataclass(eq=False)
class Held:
    """A live table and what memory must hold for it. written: positions that have KV."""

    table: BlockTable
    tokens: list[int]
    chain: PrefixChain
    salt: bytes
    written: int
    in_flight: int = 0


@dataclass
class Flight:
    step: int
    touched: set[int]
    wrote: list[tuple[Held, int]] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Steps write into a model of memory; whoever reads a block must find its own tokens there."""

    @initialize(num_blocks=st.integers(4, 24))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.memory: dict[tuple[int, int], tuple[bytes, int, int]] = {}
        self.held: list[Held] = []
        self.flights: deque[Flight] = deque()
        self.step = 0

    def new_blocks_are_free(self, blocks: list[int]) -> None:
        owned = {block for held in self.held for block in held.table.blocks}
        assert not owned & set(blocks), "a block has two owners"
        for flight in self.flights:
            assert not flight.touched & set(blocks), "a step in flight may still touch it"

    @rule(family=st.integers(0, 2), size=st.integers(1, 30), salt=st.sampled_from([b"", b"a"]))
    def allocate(self, family: int, size: int, salt: bytes) -> None:
        tokens = [family * 100 + i for i in range(size)]
        chain = chain_of(tokens, salt)
        wanted = blocks_for(size, SIZE)
        free = self.pool.num_free
        table = self.pool.allocate(wanted, chain, (size - 1) // SIZE)
        if table is None:
            assert wanted > free == self.pool.num_free
            return
        self.new_blocks_are_free(table.blocks[table.num_cached :])
        assert table.num_cached * SIZE < size
        self.held.append(Held(table, tokens, chain, salt, table.num_cached * SIZE))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.held))
        if parent.written == 0 or parent.table.copy is not None:
            return
        position, wanted = parent.written, blocks_for(parent.written + 1, SIZE)
        free = self.pool.num_free
        table = self.pool.fork(parent.table, position, wanted)
        if table is None:
            assert wanted - position // SIZE > free == self.pool.num_free
            return
        self.new_blocks_are_free(table.blocks[position // SIZE :])
        tokens, chain = parent.tokens[:position], chain_of(parent.tokens[:position], parent.salt)
        self.held.append(Held(table, tokens, chain, parent.salt, position))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 2))
    def append(self, data: st.DataObject, token: int) -> None:
        held = data.draw(st.sampled_from(self.held))
        if len(held.tokens) == len(held.table.blocks) * SIZE:
            free = self.pool.num_free
            if not self.pool.grow(held.table):
                assert free == 0
                return
            block = held.table.blocks[-1]
            others = [h for h in self.held if h is not held]
            assert all(block not in h.table.blocks for h in others)
            assert all(block not in flight.touched for flight in self.flights)
        held.tokens.append(1000 + token)

    @rule()
    def launch(self) -> None:
        copies = [copy for held in self.held if (copy := self.pool.claim_copy(held.table))]
        for copy in copies:
            for offset in range(copy.num_positions):
                self.memory[copy.target, offset] = self.memory[copy.source, offset]
        self.step += 1
        touched = {block for held in self.held for block in held.table.blocks}
        flight = Flight(self.step, touched | {copy.source for copy in copies})
        for held in self.held:
            for position in range(held.written, len(held.tokens)):
                block = held.table.blocks[position // SIZE]
                written = (held.salt, position, held.tokens[position])
                self.memory[block, position % SIZE] = written
            held.written = len(held.tokens)
            held.in_flight += 1
            flight.wrote.append((held, held.written))
        self.pool.launched(self.step)
        self.flights.append(flight)

    @precondition(lambda self: self.flights)
    @rule()
    def complete(self) -> None:
        flight = self.flights.popleft()
        self.pool.completed(flight.step)
        for held, written in flight.wrote:
            if held in self.held:
                held.chain.extend(held.tokens, written // SIZE)
                self.pool.publish(held.table, held.chain, written // SIZE)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.pool.release(held.table)

    @invariant()
    def memory_holds_what_tables_say(self) -> None:
        for held in self.held:
            safe = held.written
            if held.table.copy is not None:
                safe = safe // SIZE * SIZE
            for position in range(safe):
                found = self.memory[held.table.blocks[position // SIZE], position % SIZE]
                assert found == (held.salt, position, held.tokens[position])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_tables == len(self.held)
        owned = {block for held in self.held for block in held.table.blocks}
        if not self.flights and all(held.table.copy is None for held in self.held):
            assert self.pool.num_free == self.pool.num_blocks - len(owned)

    def teardown(self) -> None:
        for held in self.held:
            self.pool.release(held.table)
        for flight in self.flights:
            self.pool.completed(flight.step)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
TestPool = PoolMachine.TestCase
