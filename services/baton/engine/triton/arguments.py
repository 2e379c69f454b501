"""What the attention kernels are told beside queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Scores:
    """From products to weights. window: positions a query sees, itself among them, or 0 for all.
    softcap: 0 for none. sinks: [heads], or None.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def factor(self) -> float:
        """What `tiles.attend` takes as its scale."""
        return self.scale * LOG2_E * (2.0 / self.softcap if self.softcap else 1.0)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences with one query each: int32 [S] on the device, but for the tables.

    first_rows: the query's row in the batch. ends: positions it sees, its own being the last.
    table_starts: where the sequence's blocks begin in tables, int32 [N].
    """

    first_rows: torch.Tensor
    ends: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor

    def first(self, count: int) -> Sequences:
        """The first `count` of them."""
        return Sequences(
            self.first_rows[:count], self.ends[:count], self.table_starts[:count], self.tables
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of several queries. tiles: int32 [N, 2], (chunk, position // positions of a tile).

    sequences: first_rows is the batch row of a chunk's first query, ends the position after its
    last one. first_positions: int32 [C], the position of its first one.
    """

    sequences: Sequences
    first_positions: torch.Tensor
    tiles: torch.Tensor
