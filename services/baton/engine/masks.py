"""Who sees whom within attention: masks of query tiles; knows positions, but no sequences."""

from __future__ import annotations

import torch

from baton.engine.config import TILE


class MaskBank:
    """Masks of query tiles, as slices of one constant per (window, queries per KV head).

    Counted from a tile's end, which keys a query sees depends on its offset in the tile alone. So
    one matrix, aligned at its right edge, serves every tile at every position.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype = dtype
        self._device = device
        self._known: dict[tuple[int | None, int], torch.Tensor] = {}

    def take(self, window: int | None, group: int, length: int) -> torch.Tensor:
        """[16 * group, length]: rows by offset in the tile, then by query head."""
        known = self._known.get((window, group))
        if known is None or known.shape[1] < length:
            known = self._build(window, group, max(1024, 1 << (length - 1).bit_length()))
            self._known[window, group] = known
        return known[:, known.shape[1] - length :]

    def _build(self, window: int | None, group: int, width: int) -> torch.Tensor:
        back = torch.arange(width, 0, -1, device=self._device)[None]
        ahead = TILE - torch.arange(TILE, device=self._device).repeat_interleave(group)[:, None]
        seen = back >= ahead
        if window is not None:
            seen &= back < ahead + window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, float("-inf"))
