"""What BlockPool promises, one by one; `test_pool_machine` mixes it all."""

from __future__ import annotations

import pytest

from batonlm.core.kvcache.block_pool import (
    BlockCopy,
    BlockPool,
    BlockTable,
    InvariantBroken,
    blocks_for,
)
from tests.core.chains import chain_of

SIZE = 4


def computed(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table whose full blocks are published."""
    table = pool.allocate(blocks_for(len(tokens), SIZE))
    assert table is not None
    pool.publish(table, chain_of(tokens, SIZE, salt), len(tokens) // SIZE)
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


def test_tables_that_will_grow_leave_each_other_room() -> None:
    pool = BlockPool(20, SIZE)
    tables = [pool.allocate(2, room=3) for _ in range(3)]
    for _ in range(3):
        for table in tables:
            assert table is not None and pool.grow(table)
    assert [table.extents for table in tables if table] == [((0, 5),), ((5, 5),), ((10, 5),)]
    pool.check()


def test_room_is_no_ownership() -> None:
    pool = BlockPool(12, SIZE)
    table = pool.allocate(2, room=6)
    assert table is not None and pool.num_free == 10
    assert allocated(pool, 4).extents == ((8, 4),), "beside it while there is another place"
    assert allocated(pool, 6).extents == ((2, 6),), "and into it when there is none"
    pool.check()
    pool.release(table)
    pool.check()


def test_room_is_free_for_all_once_its_table_is_released() -> None:
    pool = BlockPool(12, SIZE)
    table = pool.allocate(2, room=8)
    assert table is not None
    pool.release(table)
    assert allocated(pool, 12).extents == ((0, 12),)
    pool.check()


def test_room_costs_the_prefix_cache_little() -> None:
    pool = BlockPool(32, SIZE)
    tokens = list(range(30 * SIZE))
    pool.release(computed(pool, tokens))
    pool.allocate(2, room=30)
    again = pool.allocate(30, chain_of(tokens, SIZE), 30)
    assert again is not None and again.num_cached == 30 - 8
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
    assert pool.allocate(3, chain_of(list(range(8)), SIZE), 2, keep_free=6) is None
    assert pool.num_free == 8
    again = pool.allocate(3, chain_of(list(range(8)), SIZE), 2, keep_free=5)
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
    other = pool.allocate(3, chain_of(tokens, SIZE, b"bob"), 2)
    own = pool.allocate(3, chain_of(tokens, SIZE, b"alice"), 2)
    assert other is not None and other.num_cached == 0
    assert own is not None and own.num_cached == 2
    assert not set(own.blocks) & set(other.blocks)


def test_tokens_are_compared_on_a_hit() -> None:
    pool = BlockPool(16, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4]))
    forged = chain_of([5, 6, 7, 8], SIZE)
    forged.links[0] = forged.links[0]._replace(digest=chain_of([1, 2, 3, 4], SIZE).links[0].digest)
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
        table = pool.allocate(3, chain_of(tokens, SIZE), 3)
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
    assert child is not None
    assert child.blocks[:2] == parent.blocks[:2]
    assert not set(child.blocks[2:]) & set(parent.blocks)
    assert child.copies == (BlockCopy(parent.blocks[2], child.blocks[2], 2),)
    aligned = pool.fork(parent, 8, 3)
    assert aligned is not None and not aligned.copies
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
    (copy,) = pool.claim_copies(child)
    assert copy.source == source
    assert not pool.claim_copies(child)
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


def test_a_fork_has_a_state_of_its_own_in_front_of_what_it_shares() -> None:
    pool = BlockPool(16, SIZE, state_positions=SIZE + 1)
    parent = pool.allocate(pool.blocks_for(10))
    assert parent is not None and len(parent.blocks) == 5 and pool.room(parent) == 12
    child = pool.fork(parent, 10, 5)
    assert child is not None
    assert child.blocks[2:4] == parent.blocks[2:4]
    assert not {*child.blocks[:2], child.blocks[4]} & {*parent.blocks}
    assert [*child.copies] == [
        BlockCopy(parent.blocks[i], child.blocks[i], count)
        for i, count in ((0, SIZE), (1, 1), (4, 2))
    ]
    pool.release(parent)
    pool.check()
    pool.release(child)
    assert pool.num_free == 16


def test_a_prefix_is_computed_on_from_a_state_that_was_kept() -> None:
    pool = BlockPool(16, SIZE, state_positions=SIZE + 1, snapshot_positions=SIZE)
    chain = chain_of(list(range(3 * SIZE)), SIZE)
    table, made = allocated(pool, 5), pool.snapshot()
    assert made is not None
    pool.launched(1)
    pool.completed(1)
    pool.publish(table, chain, 3)
    pool.release(table)
    assert pool.keep(made, chain.links[1])
    assert pool.num_free == 16
    found = pool.allocate(6, chain, 3, computes=4 * SIZE)
    assert found is not None and (found.num_cached, found.num_known) == (2, 3)
    assert found.copies == (
        BlockCopy(made.blocks[0], found.blocks[0], SIZE),
        BlockCopy(made.blocks[1], found.blocks[1], 1),
    )
    assert pool.num_free == 16 - 6 - 2, "what is copied is not given away before it is"
    assert pool.claim_copies(found) and pool.num_free == 16 - 6 - 2
    pool.launched(2)
    pool.completed(2)
    assert pool.num_free == 16 - 6
    handed_over = pool.allocate(5, chain, 3)
    assert handed_over is not None and not handed_over.copies
    assert handed_over.num_cached == handed_over.num_known >= 2
    pool.check()


@pytest.mark.parametrize("gone", ["its prefix", "it"])
def test_a_state_is_not_found_without_its_prefix_nor_a_prefix_without_it(gone: str) -> None:
    pool = BlockPool(16, SIZE, state_positions=1, snapshot_positions=SIZE)
    chain = chain_of(list(range(2 * SIZE)), SIZE)
    table, made = allocated(pool, 3), pool.snapshot()
    assert made is not None
    if gone == "its prefix":
        assert not pool.keep(made, chain.links[1]), "nothing was published"
        pool.publish(table, chain, 2)
    else:
        pool.publish(table, chain, 2)
        assert pool.keep(made, chain.links[1])
        pool.drop_snapshot(made)
        pool.drop_snapshot(made)
    pool.check()
    found = pool.allocate(4, chain, 2, computes=3 * SIZE)
    assert found is not None and (found.num_cached, found.num_known) == (0, 2)


def test_a_pool_holds_more_than_a_state() -> None:
    assert BlockPool(4, SIZE, state_positions=3 * SIZE).num_positions == SIZE
    with pytest.raises(ValueError, match="state"):
        BlockPool(4, SIZE, state_positions=3 * SIZE + 1)


def test_check_notices_broken_books() -> None:
    pool = BlockPool(4, SIZE)
    table = allocated(pool, 2)
    pool.check()
    table.extend([3])
    with pytest.raises(InvariantBroken):
        pool.check()


def units_of(pool: BlockPool, count: int = 100, *, everything: bool = False) -> list[int]:
    """The first positions of what is spilled."""
    return [unit.name.first_position for unit in pool.spill(count, everything=everything)]


def test_what_is_evicted_next_is_spilled_once_after_each_use() -> None:
    pool = BlockPool(40, 16)
    tokens = list(range(64 * 4 + 20))
    chain = chain_of(tokens, 16)
    table = pool.allocate(blocks_for(len(tokens), 16))
    assert table is not None
    pool.publish(table, chain, len(tokens) // 16)
    assert not units_of(pool, everything=True), "it is in use"
    pool.release(table)
    # Half of the pool can be taken without a loss.
    assert not units_of(pool)
    other = allocated(pool, 16)
    assert units_of(pool, 2) == [192, 128]
    assert units_of(pool) == [64]
    assert units_of(pool) == []
    pool.check()
    assert units_of(pool, everything=True) == [0]
    again = pool.allocate(9, chain, 8)
    assert again is not None and again.num_cached == 8
    pool.release(again)
    assert units_of(pool, everything=True) == [64, 0]
    pool.release(other)
    pool.check()


def test_what_is_spilled_is_not_intact_once_any_of_it_is_evicted() -> None:
    pool = BlockPool(16, 16)
    tokens = list(range(64 * 3))
    chain = chain_of(tokens, 16)
    table = pool.allocate(12)
    assert table is not None
    pool.publish(table, chain, 12)
    pool.release(table)
    units = pool.spill(3, everything=True)
    assert [unit.name.unit for unit in units] == [chain.links[end].units[0] for end in (11, 7, 3)]
    assert units[1].extents == tuple((block, 1) for block in table.blocks[4:8])
    assert units[1].name.parent == chain.links[3].units[0]
    assert units[2].name.parent == units[2].name.namespace
    allocated(pool, 5)
    assert [unit.intact for unit in units] == [False, True, True]
    # The end of the second one goes as well, and it cannot be spilled without it.
    allocated(pool, 4)
    assert [unit.intact for unit in units] == [False, False, True]
    pool.check()


def test_units_that_do_not_end_with_blocks_are_not_spilled() -> None:
    pool = BlockPool(16, 48)
    tokens = list(range(48 * 8))
    table = pool.allocate(8)
    assert table is not None
    pool.publish(table, chain_of(tokens, 48), 8)
    pool.release(table)
    assert not pool.spill(10, everything=True)
