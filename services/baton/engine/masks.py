"""Who sees whom within attention: masks of query tiles."""

from __future__ import annotations

import torch

from baton.engine.tiles import LOOSE, Tile


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
