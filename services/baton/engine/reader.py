"""Finds the keys and values that tiles read.

Computed once a step and window, and used by every layer with that window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.scheduler.plan import Chunk
from baton.engine.config import TILE
from baton.engine.kv_cache import KvCache
from baton.engine.masks import MaskBank
from baton.engine.spans import spans
from baton.engine.tiles import LOOSE, Tile

# Keys in a run from which on another kernel call costs less than a copy.
_WORTH_A_CALL = 512

LayerViews = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""Keys and values of one run of places, for each layer [1, heads, length, size]."""


@dataclass(frozen=True, slots=True)
class TileKeys:
    """Keys of one tile: where they lie, in one or more runs; or without runs, length of them from
    `first` on among those gathered for the chunk. mask: see `kernels.Kernel`.
    """

    runs: tuple[LayerViews, ...]
    first: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Keys of a chunk's tiles. places: int64 [N], what to gather first, None when nothing."""

    places: torch.Tensor | None
    tiles: tuple[TileKeys, ...]


class Reader:
    """exact: a tile's keys are always one run, gathered when a sequence's extents are several, so
    that the kernel sees what it would see unfragmented. Otherwise few long runs are read where they
    lie, to be merged: the same to the last bits, and without the copy.
    """

    def __init__(self, cache: KvCache, *, exact: bool):
        self._cache = cache
        self._exact = exact
        rows = TILE if exact else LOOSE
        self._masks = MaskBank(cache.keys.dtype, cache.keys.device, rows)
        self._views: dict[tuple[int, int], LayerViews] = {}
        self._former: dict[tuple[int, int], LayerViews] = {}
        self._copies = [cache.keys.new_empty(0), cache.values.new_empty(0)]

    def begin(self) -> None:
        """A new step: forgets what the last one did not use. Decode uses most of it again."""
        self._views, self._former = {}, self._views

    def read(
        self, chunk: Chunk, tiles: Sequence[Tile], window: int | None, per_head: int
    ) -> Reading:
        """tiles: all of the chunk. per_head: query heads per KV head."""
        first = tiles[0].first_key(window)
        count = tiles[-1].end - first
        runs = list(spans(chunk.extents, first, count, self._cache.block_size))
        whole = len(runs) == 1
        # A chunk that begins with an unmasked tile has no other.
        merged = self._unmasked(tiles[0], window) and count >= _WORTH_A_CALL * len(runs)
        found = []
        for tile in tiles:
            start = tile.first_key(window)
            length = tile.end - start
            views: tuple[LayerViews, ...] = ()
            if whole:
                views = (self._run(runs[0][0] + start - first, length),)
            elif merged:
                views = tuple(self._run(*run) for run in runs)
            mask = None
            if not self._unmasked(tile, window):
                mask = self._masks.take(tile, window, per_head)
            found.append(TileKeys(views, start - first, length, mask))
        return Reading(None if whole or merged else self._places(runs), tuple(found))

    def gather(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [1, heads, N, size] of a reading's places, one behind the
        other; good until the next call.
        """
        found = []
        for kind, memory in enumerate((self._cache.keys[layer], self._cache.values[layer])):
            shape = torch.Size((memory.shape[0], len(places), memory.shape[2]))
            if self._copies[kind].numel() < shape.numel():
                self._copies[kind] = memory.new_empty(shape.numel())
            out = self._copies[kind][: shape.numel()].view(shape)
            found.append(torch.index_select(memory, 1, places, out=out).unsqueeze(0))
        return found[0], found[1]

    def _unmasked(self, tile: Tile, window: int | None) -> bool:
        """Whether every query sees all that the tile reads, and it may be told so.

        The kernel rounds otherwise without a mask, so exact tiles always have one.
        """
        sees_all = window is None or tile.end - tile.first_key(window) <= window
        return tile.lone and sees_all and not self._exact

    def _places(self, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        device = self._cache.keys.device
        return torch.cat([torch.arange(start, start + n, device=device) for start, n in runs])

    def _run(self, start: int, length: int) -> LayerViews:
        """A run of places where it lies."""
        found = self._views.get((start, length)) or self._former.get((start, length))
        if found is None:
            keys = self._cache.keys.narrow(2, start, length).unsqueeze(1)
            values = self._cache.values.narrow(2, start, length).unsqueeze(1)
            found = keys.unbind(0), values.unbind(0)
        self._views[start, length] = found
        return found
