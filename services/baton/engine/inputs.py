"""Turns a StepPlan into the tensors of one forward pass.

All chunks are laid out one behind the other without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.core.kvcache.block_pool import Extents
from baton.core.scheduler.plan import Chunk, StepPlan
from baton.engine.config import TILE
from baton.engine.spans import spans


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids, positions: int64 [1, T]. places: int64 [T], where each row's KV goes.

    stale: int64, places ahead of the sequences' ends to zero first. sampled: int64 [S], the rows
    whose logits are wanted, in order. chunks: whose rows these are, in order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    stale: torch.Tensor
    sampled: torch.Tensor
    chunks: tuple[Chunk, ...]


def build_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    """The plan's chunks as tensors. Token ids still to be sampled stay as they are in the plan."""
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    stale: list[int] = []
    sampled: list[int] = []
    for chunk in plan.chunks:
        sampled += (len(token_ids) + row for row in chunk.wanted)
        token_ids += chunk.token_ids
        end = chunk.end_position
        positions += range(chunk.first_position, end)
        _extend(places, chunk.extents, chunk.first_position, len(chunk.token_ids), block_size)
        # Whoever writes a tile's first place clears the rest of it, once.
        if end % TILE and end // TILE * TILE >= chunk.first_position:
            _extend(stale, chunk.extents, end, -end % TILE, block_size)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepInputs(
        token_ids=tensor(token_ids)[None],
        positions=tensor(positions)[None],
        places=tensor(places),
        stale=tensor(stale),
        sampled=tensor(sampled),
        chunks=plan.chunks,
    )


def _extend(
    places: list[int], extents: Extents, first_position: int, count: int, block_size: int
) -> None:
    for start, length in spans(extents, first_position, count, block_size):
        places += range(start, start + length)
