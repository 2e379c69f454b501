"""The tensors of decode steps at addresses that stay, for CUDA graphs; knows rows and blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from baton.core.errors import Internal
from baton.core.scheduler.plan import StepPlan
from baton.engine.step_builder import BlockTables
from baton.engine.step_tensors import Counts, StepTensors, host_buffer


class DecodeBuffers:
    """One buffer on the device, and its views for every number of rows.

    A graph is recorded once per number of rows on `tensors(rows)` and replayed after `fill(plan,
    rows)`, which writes the same memory. Rows beyond the plan's chunks are padding: token 0 at
    position 0 of the trash block, whose logits mean nothing. Every row is sampled: chunk i of the
    plan is row i of the logits. One step's numbers are overwritten by the next one's, so both are
    enqueued on one stream, as `fill` does.
    """

    def __init__(
        self,
        block_size: int,
        trash_block: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
    ):
        """max_blocks: of one sequence."""
        self._block_size = block_size
        self._trash_block = trash_block
        self._max_rows = max_rows
        self._max_blocks = max_blocks
        self._tables = BlockTables()
        self._buffer = torch.zeros(
            self._counts(max_rows).num_bytes, dtype=torch.uint8, device=device
        )

    def tensors(self, rows: int) -> StepTensors:
        """What `fill` fills for this number of rows: the same memory at every call."""
        return self._counts(rows).carve(self._buffer)

    def fill(self, plan: StepPlan, rows: int) -> StepTensors:
        """Enqueues the upload of a plan whose chunks are one token each, or which has none.

        Raises Internal when it has more chunks than rows, or more of either than there is memory
        for.
        """
        chunks = plan.chunks
        if not len(chunks) <= rows <= self._max_rows:
            raise Internal(f"{len(chunks)} sequences in a batch of {rows} rows")
        tables = self._tables.take(plan, self._block_size)
        if max(map(len, tables), default=0) > self._max_blocks:
            raise Internal(f"a sequence has more than {self._max_blocks} blocks")
        tables.append(np.array([self._trash_block], dtype=np.int32))
        starts = np.cumsum([0, *map(len, tables)])
        counts = replace(self._counts(rows), blocks=int(starts[-1]))
        host = host_buffer(counts, self._buffer.device)
        arrays = counts.arrays(host)
        padding = rows - len(chunks)
        size = self._block_size
        positions = [chunk.first_position for chunk in chunks] + [0] * padding
        last_blocks = [int(table[-1]) for table in tables[:-1]] + [self._trash_block] * padding
        arrays["token_ids"][:] = [chunk.token_ids[0] for chunk in chunks] + [0] * padding
        arrays["positions"][:] = positions
        arrays["first_positions"][:] = positions
        arrays["ends"][:] = arrays["positions"] + 1
        arrays["places"][:] = np.array(last_blocks) * size + arrays["positions"] % size
        arrays["sampled"][:] = arrays["first_rows"][:] = range(rows)
        arrays["table_starts"][:] = np.append(starts[: len(chunks)], [starts[-2]] * padding)
        np.concatenate(tables, out=arrays["tables"])
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        return self.tensors(rows)

    def _counts(self, rows: int) -> Counts:
        blocks = rows * self._max_blocks + 1
        return Counts(rows=rows, sampled=rows, chunks=rows, tiles=0, blocks=blocks, lone=rows)
