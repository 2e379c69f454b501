"""Swapping, what becomes of a preempted sequence's KV: moved to swap memory or computed again.

The cheaper one is taken, as measured: seconds per swapped block, both ways, against seconds per
prefilled position. While one of them is not known, all but short contexts are swapped, which
teaches it. Every choice against swapping lets the measured time fade a little, so that one slow
move is not held against it for ever.
"""

from __future__ import annotations

from collections import Counter

from baton.core.kvcache.block_pool import BlockPool, SwapGrant, SwapPlace, SwapSpace, blocks_for
from baton.core.scheduler.plan import BlockSwap
from baton.core.scheduler.sequence import Sequence, SequenceGroup
from baton.core.scheduler.step_cost import StepCost

_SHORT_BLOCKS = 4
"""A context of no more blocks is computed again while nothing is known: one small chunk does it."""

_RENEW = 0.2
"""Weight of the newest measurement."""

_FADE = 0.95


class Swapping:
    """swap_out and swap_in: the moves of the step that is planned now."""

    def __init__(self, pool: BlockPool, space: SwapSpace, cost: StepCost):
        self._pool = pool
        self._space = space
        self._cost = cost
        self._block_s: dict[SwapPlace, float] = {}
        self._moves: dict[int, Counter[SwapPlace]] = {}
        self._restored: list[SwapGrant] = []
        self._moved: Counter[SwapPlace] = Counter()
        self.swap_out: list[BlockSwap] = []
        self.swap_in: list[BlockSwap] = []

    def store(self, sequence: Sequence) -> SwapGrant | None:
        """Has a running sequence's KV moved out by the step that is planned now.

        None when it cannot be kept or need not be: then it has to be computed again.
        """
        table = sequence.table
        # A fork that has not run here yet does not have its own last block's content.
        if table is None or table.copy is not None:
            return None
        count = blocks_for(sequence.reach, self._pool.block_size)
        place = self._space.place_for(count)
        if place is None or not self._worth(place, count, sequence):
            return None
        grant = self._space.take(place, count)
        self.swap_out.append(BlockSwap(tuple(table.blocks[:count]), grant.blocks))
        self._moved[place] += count
        return grant

    def fetch(self, shared: SequenceGroup) -> None:
        """Has the KV of one that got blocks again moved in by the step that is planned now.

        What the prefix cache still had is left out.
        """
        grant, table = shared.stored, shared.table
        assert grant is not None and table is not None
        shared.stored = None
        self._restored.append(grant)
        missing = slice(table.num_cached, len(grant.blocks))
        if blocks := tuple(table.blocks[missing]):
            self.swap_in.append(BlockSwap(blocks, grant.blocks[missing]))
            self._moved[grant.place] += len(blocks)

    def launched(self, step: int) -> None:
        """The planned step starts: its moves are under way."""
        self._space.launched(step)
        for swap in self.swap_out:
            self._pool.withhold(swap.blocks)
        for grant in self._restored:
            self._space.release(grant)
        if self._moved:
            self._moves[step] = self._moved
            self._moved = Counter()
        self._restored, self.swap_out, self.swap_in = [], [], []

    def completed(self, step: int, swap_s: float) -> None:
        """A step is done; its moves took so many seconds."""
        self._space.completed(step)
        moved = self._moves.pop(step, None)
        # Of a step that moved blocks to both kinds it cannot be told which one took the time.
        if moved is not None and len(moved) == 1:
            ((place, count),) = moved.items()
            known = self._block_s.get(place, swap_s / count)
            self._block_s[place] = known + _RENEW * (swap_s / count - known)

    def dropped(self) -> None:
        """The planned step does not come to be, and moves nothing. Nothing was to be fetched."""
        self.swap_out = []
        self._moved = Counter()

    def _worth(self, place: SwapPlace, count: int, sequence: Sequence) -> bool:
        block_s = self._block_s.get(place)
        position_s = self._cost.prefill_position_s
        if block_s is None or position_s is None:
            return count > _SHORT_BLOCKS
        assert sequence.table is not None
        shared = self._pool.num_shared(sequence.table) * self._pool.block_size
        worth = 2 * count * block_s <= max(0, sequence.reach - shared) * position_s
        if not worth:
            self._block_s[place] = block_s * _FADE
        return worth
