"""Cuts chunks into tiles of queries that attention handles together.

In exact mode a tile's queries are those of 16 aligned positions, and it reads keys up to the last
of these: what is computed for a position is then a function of the position alone, never of how the
chunk was cut. That is half of what makes a row's bits independent of chunking; the kernels are the
other half. Otherwise tiles are as wide as pays, and read no key beyond their last query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.scheduler.plan import Chunk
from baton.engine.config import TILE

LOOSE = 32
"""Positions of a tile outside exact mode: wider ones save little more, and take larger masks."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive rows of one chunk, the first of them the batch's row first_row.

    start, end: the positions that the tile stands for, of which first_position and the count - 1
    behind it are there. lone: the one query there is computed alone, without padding.
    """

    first_row: int
    first_position: int
    count: int
    start: int
    end: int
    lone: bool

    @property
    def lead(self) -> int:
        """How many positions of padding are ahead of the first row."""
        return 0 if self.lone else self.first_position - self.start

    @property
    def width(self) -> int:
        """Positions with padding."""
        return 1 if self.lone else self.end - self.start

    def first_key(self, window: int | None) -> int:
        """The first position whose key it reads: a whole multiple of 16."""
        return 0 if window is None else max(0, self.start - window + 1) // TILE * TILE

    def rows(self) -> list[int]:
        """The batch row of each position, -1 for padding."""
        after = self.width - self.lead - self.count
        own = range(self.first_row, self.first_row + self.count)
        return [*[-1] * self.lead, *own, *[-1] * after]


def exact_tiles(chunk: Chunk, first_row: int, *, lone: bool) -> Iterator[Tile]:
    """Whole tiles of 16; lone: but for single queries, as those of decode are."""
    for row, position, count in _cut(chunk, first_row, chunk.first_position % TILE, TILE):
        start = position // TILE * TILE
        yield Tile(row, position, count, start, start + TILE, lone and count == 1)


def loose_tiles(chunk: Chunk, first_row: int) -> Iterator[Tile]:
    """Tiles of what is there, without padding."""
    for row, position, count in _cut(chunk, first_row, 0, LOOSE):
        yield Tile(row, position, count, position, position + count, count == 1)


def _cut(chunk: Chunk, first_row: int, offset: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Yields (row, position, count): at most width rows, the first of them offset fewer."""
    position, row = chunk.first_position, first_row
    while position < chunk.end_position:
        count = min(width - offset, chunk.end_position - position)
        yield row, position, count
        position, row, offset = position + count, row + count, 0
