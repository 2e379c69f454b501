"""Turns a StepPlan into the tensors of one forward pass; knows places and tiles, but no layers.

All chunks are laid out one behind the other without padding. Attention works on query *tiles*: the
rows of a chunk whose positions share `position // 16`. What keys a tile reads is a function of the
tile alone, never of how the chunk was cut. That is half of what makes a row's bits independent of
chunking; the kernels are the other half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.core.plan import Chunk, Extents, StepPlan
from baton.engine.config import TILE
from baton.engine.spans import spans


@dataclass(frozen=True, slots=True)
class Tile:
    """Up to 16 rows of one chunk. end: the position after the tile's last, a multiple of 16."""

    extents: Extents
    first_row: int
    first_position: int
    count: int

    @property
    def end(self) -> int:
        return self.first_position // TILE * TILE + TILE


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one width, whose queries are gathered together.

    rows: int64 [tiles * width], the batch row of each query; padding repeats a row of the tile.
    kept: int64 [K], which of those are real, or None when all are. targets: int64 [K], their rows.
    """

    width: int
    tiles: tuple[Tile, ...]
    rows: torch.Tensor
    kept: torch.Tensor | None
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids, positions: int64 [1, T]. places: int64 [T], where each row's KV goes.

    stale: int64, places ahead of the sequences' ends to zero first. sampled: int64 [S], the rows
    whose logits are wanted, one per chunk with samples.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    stale: torch.Tensor
    sampled: torch.Tensor
    groups: tuple[TileGroup, ...]


def build_inputs(
    plan: StepPlan, block_size: int, device: torch.device, *, lone_rows: bool
) -> StepInputs:
    """lone_rows: whether a tile with a single query may be computed alone (decode's fast path) or
    must be padded to a whole tile of queries.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    stale: list[int] = []
    sampled: list[int] = []
    tiles: list[Tile] = []
    for chunk in plan.chunks:
        tiles += _tiles(chunk, len(token_ids))
        token_ids += chunk.token_ids
        positions += range(chunk.first_position, chunk.end_position)
        _extend(places, chunk.extents, chunk.first_position, len(chunk.token_ids), block_size)
        end = chunk.end_position
        # Whoever writes a tile's first place clears the rest of it, once.
        if end % TILE and end // TILE * TILE >= chunk.first_position:
            _extend(stale, chunk.extents, end, -end % TILE, block_size)
        if chunk.samples:
            sampled.append(len(token_ids) - 1)
    lone = [tile for tile in tiles if lone_rows and tile.count == 1]
    wide = [tile for tile in tiles if not (lone_rows and tile.count == 1)]
    groups = [_group(found, w, device) for found, w in ((lone, 1), (wide, TILE)) if found]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepInputs(
        token_ids=tensor(token_ids)[None],
        positions=tensor(positions)[None],
        places=tensor(places),
        stale=tensor(stale),
        sampled=tensor(sampled),
        groups=tuple(groups),
    )


def _tiles(chunk: Chunk, first_row: int) -> list[Tile]:
    found = []
    position = chunk.first_position
    while position < chunk.end_position:
        end = min(position // TILE * TILE + TILE, chunk.end_position)
        row = first_row + position - chunk.first_position
        found.append(Tile(chunk.extents, row, position, end - position))
        position = end
    return found


def _group(tiles: list[Tile], width: int, device: torch.device) -> TileGroup:
    rows: list[int] = []
    kept: list[int] = []
    targets: list[int] = []
    for tile in tiles:
        offset = tile.first_position % TILE if width == TILE else 0
        own = range(tile.first_row, tile.first_row + tile.count)
        after = width - offset - tile.count
        kept += range(len(rows) + offset, len(rows) + offset + tile.count)
        rows += [own[0]] * offset + list(own) + [own[-1]] * after
        targets += own
    return TileGroup(
        width=width,
        tiles=tuple(tiles),
        rows=torch.tensor(rows, device=device),
        kept=None if len(kept) == len(rows) else torch.tensor(kept, device=device),
        targets=torch.tensor(targets, device=device),
    )


def _extend(
    places: list[int], extents: Extents, first_position: int, count: int, block_size: int
) -> None:
    for start, length in spans(extents, first_position, count, block_size):
        places += range(start, start + length)
