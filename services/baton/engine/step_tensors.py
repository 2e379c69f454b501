"""The tensors of one step, and how they lie in one buffer that one copy takes to the device.

Knows numbers and addresses; what they are computed from is `step_builder`'s. Each tensor begins at
a multiple of 16 bytes, whatever came before it: Triton compiles a kernel anew for pointers that do
not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step. Chunks stand in the batch in the plan's order, one row per token.

    The five tensors by chunk hold the L chunks of one token first (`lone` is L), then the others.

    token_ids, positions: int64 [1, T]; token_ids still holds plan.PENDING where the plan does.
    sampled: int64 [S], the rows whose logits are wanted, in order.
    places: int32 [T], where each row's KV goes.
    first_rows, first_positions, ends, table_starts: int32 [C], by chunk: its first row, its first
    position, the position after its last, and where its blocks begin in tables.
    tables: int32 [N], block ids. tiles: int32 [tiles, 2], (chunk, tile of its sequence).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    places: torch.Tensor
    first_rows: torch.Tensor
    first_positions: torch.Tensor
    ends: torch.Tensor
    table_starts: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor
    lone: int


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of everything a step has; all tensors' places in its buffer follow from that."""

    rows: int
    sampled: int
    chunks: int
    tiles: int
    blocks: int
    lone: int

    @property
    def num_bytes(self) -> int:
        return sum(_padded(count * dtype.itemsize) for _, count, dtype in self._sizes())

    def carve(self, buffer: torch.Tensor) -> StepTensors:
        """Views of a buffer, uint8 of at least num_bytes."""
        views = self.flat(buffer)
        return StepTensors(
            token_ids=views["token_ids"][None],
            positions=views["positions"][None],
            sampled=views["sampled"],
            places=views["places"],
            first_rows=views["first_rows"],
            first_positions=views["first_positions"],
            ends=views["ends"],
            table_starts=views["table_starts"],
            tiles=views["tiles"].view(-1, 2),
            tables=views["tables"],
            lone=self.lone,
        )

    def arrays(self, buffer: torch.Tensor) -> dict[str, np.ndarray]:
        """The same of a buffer on the host, by name: flat arrays to write to."""
        return {name: view.numpy() for name, view in self.flat(buffer).items()}

    def flat(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors by name, each of one dimension."""
        views = {}
        first = 0
        for name, count, dtype in self._sizes():
            size = count * dtype.itemsize
            views[name] = buffer[first : first + size].view(dtype)
            first += _padded(size)
        return views

    def _sizes(self) -> list[tuple[str, int, torch.dtype]]:
        """In the order in which they lie. tables, which vary most, come last: addresses of the
        others depend on the other counts alone."""
        long, short = torch.int64, torch.int32
        return [
            ("token_ids", self.rows, long),
            ("positions", self.rows, long),
            ("sampled", self.sampled, long),
            ("places", self.rows, short),
            ("first_rows", self.chunks, short),
            ("first_positions", self.chunks, short),
            ("ends", self.chunks, short),
            ("table_starts", self.chunks, short),
            ("tiles", 2 * self.tiles, short),
            ("tables", self.blocks, short),
        ]


def host_buffer(counts: Counts, device: torch.device) -> torch.Tensor:
    """Memory for one step's numbers, pinned for a GPU.

    It may be dropped as soon as its upload is enqueued: torch gives pinned memory out again only
    when the copies from it are done.
    """
    pinned = device.type == "cuda"
    return torch.empty(counts.num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
