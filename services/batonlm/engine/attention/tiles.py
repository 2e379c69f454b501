"""Cuts chunks into tiles of queries that attention handles together, with their masks and routes.

In exact mode a tile's queries are those of 16 aligned positions, and it reads keys up to the last
of these: what is computed for a position is then a function of the position alone, never of how the
chunk was cut. That is half of what makes a row's bits independent of chunking; the kernels are the
other half. Otherwise tiles are as wide as pays, and read no key beyond their last query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from batonlm.core.scheduler.plan import Chunk
from batonlm.engine.config import TILE

LOOSE = 32
"""Positions of a tile outside exact mode: wider ones save little more, and take larger masks."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive rows of one chunk."""

    first_row: int
    """The first one, counted in the batch."""
    first_position: int
    """Of the first row."""
    count: int
    """How many rows are there."""
    start: int
    """The first of the positions that the tile stands for, there or not."""
    end: int
    """The position after the last of these."""
    lone: bool
    """Whether the one query there is computed alone, without padding."""

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


def cut_tiles(chunk: Chunk, first_row: int, *, exact: bool, lone: bool) -> list[Tile]:
    """exact: whole tiles of 16; lone: but for single queries, as those of decode are. Otherwise
    tiles of what is there, without padding."""
    tiles = []
    row, position = first_row, chunk.first_position
    width = TILE if exact else LOOSE
    offset = position % TILE if exact else 0
    while position < chunk.end_position:
        count = min(width - offset, chunk.end_position - position)
        alone = count == 1 and (lone or not exact)
        start = position - offset
        end = start + TILE if exact else position + count
        tiles.append(Tile(row, position, count, start, end, alone))
        position, row, offset = position + count, row + count, 0
    return tiles


class MaskBank:
    """Masks of query tiles, as slices of one constant per (window, queries per KV head).

    Counted from a tile's end, which keys a query sees depends on its own distance from that end
    alone. So one matrix, aligned at its last row and its right edge, serves every tile at every
    position.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, rows: int = LOOSE):
        """rows: how many positions a tile has at most."""
        self._dtype = dtype
        self._device = device
        self._rows = rows
        self._known: dict[tuple[int | None, int], torch.Tensor] = {}

    def take(self, tile: Tile, window: int | None, group: int) -> torch.Tensor:
        """[1, 1, rows, keys], keys from the tile's first to its end.

        group: queries per KV head. rows: width * group, by position and then by query head; or a
        single one for all heads of a lone query.
        """
        length = tile.end - tile.first_key(window)
        known = self._known.get((window, group))
        if known is None or known.shape[3] < length:
            known = self._build(window, group, max(1024, 1 << (length - 1).bit_length()))
            self._known[window, group] = known
        first = self._rows - tile.end + tile.first_position - tile.lead
        rows = known.narrow(2, first * group, 1 if tile.lone else tile.width * group)
        return rows.narrow(3, known.shape[3] - length, length)

    def _build(self, window: int | None, group: int, width: int) -> torch.Tensor:
        back = torch.arange(width, 0, -1, device=self._device)[None]
        ahead = torch.arange(self._rows, 0, -1, device=self._device).repeat_interleave(group)
        seen = back >= ahead[:, None]
        if window is not None:
            seen &= back < ahead[:, None] + window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, float("-inf"))[None, None]


@dataclass(frozen=True, slots=True)
class Routes:
    """The ways of query rows, flat [T * heads, D], into tiles and back; computed once a step.

    A tile is [kv_heads, n, D], n being all query heads that share a KV head, of all positions of
    the tile, position by position. Tiles lie one behind the other.
    """

    kv_heads: int
    sources: torch.Tensor | None
    """int64 [N], the row that each row of the tiles is; None when they are the same."""
    targets: torch.Tensor | None
    """int64 [T * heads], where each row is found in the tiles; None when `sources` is."""
    groups: tuple[tuple[int, int], ...]
    """(tiles, n) of neighbours with the same n."""

    def scatter(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """[T * heads, D] -> per tile [1, kv_heads, n, D]."""
        if self.sources is not None:
            rows = rows.index_select(0, self.sources)
        found: list[torch.Tensor] = []
        first = 0
        for tiles, count in self.groups:
            group = rows.narrow(0, first, tiles * self.kv_heads * count)
            found += group.view(tiles, 1, self.kv_heads, count, -1).unbind(0)
            first += len(group)
        return found

    def gather(self, tiles: list[torch.Tensor]) -> torch.Tensor:
        """Per tile [1, kv_heads, n, ...] -> [T * heads, ...]."""
        groups = []
        first = 0
        for count, _ in self.groups:
            groups.append(torch.cat(tiles[first : first + count]).flatten(0, 2))
            first += count
        rows = groups[0] if len(groups) == 1 else torch.cat(groups)
        return rows if self.targets is None else rows.index_select(0, self.targets)


def find_routes(
    tiles: Sequence[Tile],
    heads: int,
    kv_heads: int,
    lone_rows: int,
    device: torch.device,
    padding: int = 0,
) -> Routes:
    """lone_rows: to how many rows the query heads of a lone query are padded. padding: rows of the
    batch behind those of all tiles."""
    per_head = heads // kv_heads
    if not padding and lone_rows == per_head and all(tile.lone for tile in tiles):
        return Routes(kv_heads, None, None, ((len(tiles), per_head),))
    head = torch.arange(heads, device=device).view(kv_heads, 1, per_head)
    groups: list[tuple[int, int]] = []
    found: list[torch.Tensor] = []
    for (_, lone), group in groupby(tiles, lambda tile: (tile.width, tile.lone)):
        rows = torch.tensor([tile.rows() for tile in group], device=device)[:, None, :, None]
        index = torch.where(rows < 0, -1, rows * heads + head).flatten(2)
        if lone:
            index = torch.nn.functional.pad(index, (0, lone_rows - per_head), value=-1)
        groups.append((len(index), index.shape[-1]))
        found.append(index.flatten())
    sources = torch.cat(found)
    kept = (sources >= 0).nonzero().flatten()
    targets = kept.new_zeros(len(kept) + padding * heads)
    targets[sources[kept]] = kept
    # What padding computes is thrown away; any row will do for it.
    return Routes(kv_heads, sources.clamp_min(0), targets, tuple(groups))
