"""What ranks add up and agree on, over gloo.

Sums are made of gathered parts in the order of the ranks. gloo's own sum cuts a tensor into pieces
and adds each in another order: what a row comes to would then hang on how many rows there are.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)
"""Longer than ranks can be apart, which is most while they load. A rank that died ends the others'
waiting at once."""


class Group:
    """One rank's end. All ranks must call the same methods in the same order.

    store: a file, not there yet, through which ranks of one machine find each other.
    """

    def __init__(self, rank: int, size: int, store: Path):
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _TIMEOUT
        found = distributed.FileStore(str(store), size)  # type: ignore[attr-defined]
        self.rank, self.size = rank, size
        self._gloo = gloo(found, rank, size, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on each. Half precision is added in float32."""
        parts = self._gather(part)
        if part.dtype.itemsize < 4:
            parts = [each.float() for each in parts]
        total = parts[0] + parts[1]
        for each in parts[2:]:
            total += each
        return total.to(part.dtype)

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return int(min(self._gather(torch.tensor([number], dtype=torch.int64))))

    def common(self, numbers: frozenset[int], limit: int) -> frozenset[int]:
        """What is in all ranks' sets of numbers from 0 up to `limit`."""
        mask = torch.zeros(limit + 1, dtype=torch.int64)
        mask[sorted(numbers)] = 1
        return frozenset(torch.stack(self._gather(mask)).amin(0).nonzero().flatten().tolist())

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._gloo.allgather([parts], [part]).wait()  # type: ignore[attr-defined]
        return parts
