"""BlockTable, a sequence's list of blocks; knows nothing of other tables nor of what is in it."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.scheduler.plan import BlockCopy, Extents


def blocks_for(num_positions: int, block_size: int) -> int:
    """How many blocks hold so many positions."""
    return -(-num_positions // block_size)


class BlockTable:
    """Blocks in position order, owned until `BlockPool.release`. Only the pool changes it.

    num_cached: leading blocks that came from the prefix cache. num_published: leading blocks that
    others may find there. copy: what has to be copied into this table before its first step.
    room_end: the block at which the room ends that the pool kept behind the last one, or less.
    """

    __slots__ = (
        "_extents",
        "_runs",
        "blocks",
        "copy",
        "num_cached",
        "num_published",
        "room_end",
    )

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_cached = 0
        self.num_published = 0
        self.room_end = 0
        self.copy: BlockCopy | None = None
        self._runs: list[tuple[int, int]] = []
        self._extents: Extents | None = ()

    @property
    def extents(self) -> Extents:
        """The blocks as runs of consecutive ids. The same object until the table grows."""
        if self._extents is None:
            self._extents = tuple(self._runs)
        return self._extents

    def extend(self, blocks: Iterable[int]) -> None:
        runs = self._runs
        for block in blocks:
            self.blocks.append(block)
            if runs and sum(runs[-1]) == block:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        self._extents = None
