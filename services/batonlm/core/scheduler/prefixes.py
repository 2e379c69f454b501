"""PrefixTransfers: blocks of prefixes that another worker collects, or that come from another one.

A worker offers what its prefix cache has: the blocks are pinned while they are on offer, so none of
them is evicted meanwhile. A worker that collects takes free blocks for what its own cache lacks.
Both give their blocks up when the transfer has ended, however it did. What arrived by then is put
into the cache, where it is found by whatever is computed next.

Both are bounded in number, and leave what runs here the blocks that it still needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from batonlm.core.errors import Overloaded
from batonlm.core.kvcache.block_pool import BlockPool, BlockTable, Extents
from batonlm.core.kvcache.prefix import PrefixChain

MAX_OFFERED = 16
MAX_ARRIVING = 16


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlocks:
    """A prefix's blocks, pinned for one transfer until `PrefixTransfers.release`."""

    chain: PrefixChain
    table: BlockTable
    num_positions: int
    """Of the transfer."""
    cached: int
    """Leading positions that were in the prefix cache at the start."""
    arrives: bool
    """Whether the others come from another worker."""

    @property
    def extents(self) -> Extents:
        return self.table.extents


class PrefixTransfers:
    """What is pinned for transfers. None of a model whose layers keep a state: a prefix's KV is
    worth nothing without the state behind it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._offered: set[PrefixBlocks] = set()
        self._arriving: set[PrefixBlocks] = set()

    def __len__(self) -> int:
        return len(self._offered) + len(self._arriving)

    def offer(self, chain: PrefixChain, num_blocks: int, keep_free: int) -> PrefixBlocks | None:
        """Pins what the cache has of a chain's first num_blocks; None: nothing.

        keep_free: blocks to leave free. Raises Overloaded when too many prefixes are on offer, or
        so few blocks are free.
        """
        pool = self._pool
        found = 0 if pool.state_blocks else pool.num_found(chain, num_blocks)
        if not found:
            return None
        full = len(self._offered) >= MAX_OFFERED
        table = None if full else pool.allocate(found, chain, found, keep_free)
        if table is None:
            raise Overloaded("This worker can offer no more prefixes now.")
        size = found * pool.block_size
        blocks = PrefixBlocks(chain, table, size, size, arrives=False)
        self._offered.add(blocks)
        return blocks

    def expect(self, chain: PrefixChain, num_positions: int, keep_free: int) -> PrefixBlocks | None:
        """Takes blocks for a prefix of so many positions, of which another worker gives what the
        cache here lacks. None when there is no room. keep_free: as in `offer`."""
        pool = self._pool
        if pool.state_blocks or len(self._arriving) >= MAX_ARRIVING:
            return None
        full_blocks = num_positions // pool.block_size
        table = pool.allocate(pool.blocks_for(num_positions), chain, full_blocks, keep_free)
        if table is None:
            return None
        cached = table.num_cached * pool.block_size
        blocks = PrefixBlocks(chain, table, num_positions, cached, arrives=True)
        self._arriving.add(blocks)
        return blocks

    def release(self, blocks: PrefixBlocks, arrived: int) -> None:
        """The transfer has ended, and nothing copies from or to the blocks. arrived: positions
        below this one have KV now; whole blocks of them can be found."""
        self._pool.publish(blocks.table, blocks.chain, arrived // self._pool.block_size)
        (self._arriving if blocks.arrives else self._offered).remove(blocks)
        self._pool.release(blocks.table)
