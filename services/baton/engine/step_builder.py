"""Turns a StepPlan into StepTensors."""

from __future__ import annotations

import numpy as np
import torch

from baton.core.kvcache.block_pool import Extents
from baton.core.scheduler.plan import Chunk, StepPlan
from baton.engine.block_cache import block_ids, places_of
from baton.engine.step_tensors import Counts, StepTensors, host_buffer


class BlockTables:
    """Block ids of the sequences of the last step, so that only tables that grew are expanded."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Extents, np.ndarray]] = {}

    def take(self, plan: StepPlan, block_size: int) -> list[np.ndarray]:
        """For each chunk its blocks, int32, up to its last position."""
        before, self._known = self._known, {}
        found = []
        for chunk in plan.chunks:
            known = before.get(chunk.sequence_id)
            if known is None or known[0] != chunk.extents:
                known = (chunk.extents, block_ids(chunk.extents))
            self._known[chunk.sequence_id] = known
            found.append(known[1][: -(-chunk.end_position // block_size)])
        return found


class StepBuilder:
    """Builds tensors of any plan. tile_positions: positions in a tile of the prefill kernel."""

    def __init__(self, block_size: int, tile_positions: int, device: torch.device):
        self._block_size = block_size
        self._tile_positions = tile_positions
        self._device = device
        self._tables = BlockTables()

    def build(self, plan: StepPlan) -> StepTensors:
        """New tensors, enqueued on the current stream."""
        tables = self._tables.take(plan, self._block_size)
        lone = [i for i, chunk in enumerate(plan.chunks) if len(chunk.token_ids) == 1]
        order = lone + [i for i, chunk in enumerate(plan.chunks) if len(chunk.token_ids) > 1]
        tiles = [
            (at, tile)
            for at, i in enumerate(order[len(lone) :], len(lone))
            for tile in self._tiles(plan.chunks[i])
        ]
        counts = Counts(
            rows=plan.num_tokens,
            sampled=sum(len(chunk.wanted) for chunk in plan.chunks),
            chunks=len(order),
            tiles=len(tiles),
            blocks=sum(map(len, tables)),
            lone=len(lone),
        )
        host = host_buffer(counts, self._device)
        self._fill(counts.arrays(host), plan, order, tables, tiles)
        return counts.carve(host.to(self._device, non_blocking=True))

    def _tiles(self, chunk: Chunk) -> range:
        """The last first: it sees most, and the longest work should not begin last."""
        first = chunk.first_position // self._tile_positions
        return range((chunk.end_position - 1) // self._tile_positions, first - 1, -1)

    def _fill(
        self,
        arrays: dict[str, np.ndarray],
        plan: StepPlan,
        order: list[int],
        tables: list[np.ndarray],
        tiles: list[tuple[int, int]],
    ) -> None:
        rows = []
        sampled = []
        row = 0
        for chunk, table in zip(plan.chunks, tables, strict=True):
            rows.append(row)
            first, count = chunk.first_position, len(chunk.token_ids)
            own = slice(row, row + count)
            arrays["token_ids"][own] = chunk.token_ids
            arrays["positions"][own] = range(first, first + count)
            arrays["places"][own] = places_of(table, first, count, self._block_size)
            sampled += [row + wanted for wanted in chunk.wanted]
            row += count
        arrays["sampled"][:] = sampled
        arrays["tiles"][:] = np.array(tiles, dtype=np.int32).reshape(-1)
        start = 0
        for at, i in enumerate(order):
            chunk, table = plan.chunks[i], tables[i]
            arrays["first_rows"][at] = rows[i]
            arrays["first_positions"][at] = chunk.first_position
            arrays["ends"][at] = chunk.end_position
            arrays["table_starts"][at] = start
            arrays["tables"][start : start + len(table)] = table
            start += len(table)
