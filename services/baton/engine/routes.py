"""The ways of query rows into tiles and back.

Computed once a step and used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from baton.engine.tiles import Tile


@dataclass(frozen=True, slots=True)
class Routes:
    """rows, flat [T * heads, D], go to tiles of [kv_heads, n, D], one behind the other.

    n: all query heads that share a KV head, of all positions of the tile, position by position.
    sources: int64 [N], which row each is; targets: int64 [T * heads], where it is found again; both
    None when that changes nothing. groups: (tiles, n) of neighbours with the same n.
    """

    kv_heads: int
    sources: torch.Tensor | None
    targets: torch.Tensor | None
    groups: tuple[tuple[int, int], ...]

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
