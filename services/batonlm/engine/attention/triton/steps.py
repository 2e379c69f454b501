"""The tensors of one step, built from a plan and laid out in one buffer for one copy to the device.

Each tensor begins at a multiple of 16 bytes, whatever came before it: Triton compiles a kernel anew
for pointers that do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.scheduler.plan import StepPlan
from batonlm.engine.kv.cache import block_ids, places_of

_ALIGNED = 16
"""Bytes, where each tensor begins."""
_BY_SPAN = "first_rows", "first_positions", "ends", "table_starts"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step. Chunks stand in the batch in the plan's order, one row per token.

    Four tensors are by span: each position of a chunk that decodes is one, drafts too, and they
    come first; then each other chunk as a whole.
    """

    token_ids: torch.Tensor
    """int64 [1, T]; it still holds plan.PENDING where the plan does."""
    positions: torch.Tensor
    """int64 [1, T]."""
    sampled: torch.Tensor
    """int64 [S], the rows whose logits are wanted, in order."""
    places: torch.Tensor
    """int32 [T], where each row's KV goes."""
    first_rows: torch.Tensor
    """int32 [C], each span's first row."""
    first_positions: torch.Tensor
    """int32 [C], each span's first position."""
    ends: torch.Tensor
    """int32 [C], the position after each span's last."""
    table_starts: torch.Tensor
    """int32 [C], where the blocks of each span's sequence begin in `tables`."""
    tiles: torch.Tensor
    """int32 [tiles, 2], (span, tile of its sequence) of the spans that are whole chunks."""
    tables: torch.Tensor
    """int32 [N], block ids."""
    lone: int
    """How many spans are one position of a chunk that decodes."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of everything a step has; all tensors' places in its buffer follow from that."""

    rows: int
    sampled: int
    spans: int
    tiles: int
    blocks: int
    lone: int

    @property
    def num_bytes(self) -> int:
        return sum(_padded(count * dtype.itemsize) for _, count, dtype in self._sizes())

    def host_buffer(self, device: torch.device) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """Memory on the host for the step's numbers, pinned for a GPU, and flat arrays by name to
        write them to.

        It may be dropped as soon as its upload is enqueued: torch gives pinned memory out again
        only when the copies from it are done.
        """
        pinned = device.type == "cuda"
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return buffer, {name: view.numpy() for name, view in self._views(buffer).items()}

    def carve(self, buffer: torch.Tensor) -> StepTensors:
        """Views of a buffer, uint8 of at least num_bytes."""
        views = self._views(buffer)
        for name in ("token_ids", "positions"):
            views[name] = views[name][None]
        views["tiles"] = views["tiles"].view(-1, 2)
        return StepTensors(**views, lone=self.lone)

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
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
            ("first_rows", self.spans, short),
            ("first_positions", self.spans, short),
            ("ends", self.spans, short),
            ("table_starts", self.spans, short),
            ("tiles", 2 * self.tiles, short),
            ("tables", self.blocks, short),
        ]


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


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
        lone: list[tuple[int, int, int, int]] = []
        whole: list[tuple[int, int, int, int]] = []
        row = start = 0
        for chunk, table in zip(plan.chunks, tables, strict=True):
            first, count = chunk.first_position, len(chunk.token_ids)
            if chunk.decodes:
                lone += [(row + i, first + i, first + i + 1, start) for i in range(count)]
            else:
                whole.append((row, first, first + count, start))
            row += count
            start += len(table)
        tiles = [
            (at, tile)
            for at, (_, first, end, _) in enumerate(whole, len(lone))
            for tile in self._tiles(first, end)
        ]
        counts = Counts(
            rows=row,
            sampled=sum(len(chunk.wanted) for chunk in plan.chunks),
            spans=len(lone) + len(whole),
            tiles=len(tiles),
            blocks=start,
            lone=len(lone),
        )
        host, arrays = counts.host_buffer(self._device)
        spans = np.array(lone + whole, dtype=np.int32).reshape(-1, 4).T
        for name, numbers in zip(_BY_SPAN, spans, strict=True):
            arrays[name][:] = numbers
        arrays["tiles"][:] = np.array(tiles, dtype=np.int32).reshape(-1)
        np.concatenate(tables, out=arrays["tables"])
        self._fill_rows(arrays, plan, tables)
        return counts.carve(host.to(self._device, non_blocking=True))

    def _tiles(self, first: int, end: int) -> range:
        """The last first: it sees most, and the longest work should not begin last."""
        size = self._tile_positions
        return range((end - 1) // size, first // size - 1, -1)

    def _fill_rows(
        self, arrays: dict[str, np.ndarray], plan: StepPlan, tables: list[np.ndarray]
    ) -> None:
        sampled = []
        row = 0
        for chunk, table in zip(plan.chunks, tables, strict=True):
            first, count = chunk.first_position, len(chunk.token_ids)
            own = slice(row, row + count)
            arrays["token_ids"][own] = chunk.token_ids
            arrays["positions"][own] = range(first, first + count)
            arrays["places"][own] = places_of(table, first, count, self._block_size)
            sampled += [row + wanted for wanted in chunk.wanted]
            row += count
        arrays["sampled"][:] = sampled


class DecodeBuffers:
    """One buffer on the device, and its views for every number of rows.

    A graph is recorded once per number of rows on `tensors(rows)` and replayed after `fill(plan,
    rows)`, which writes the same memory. Every row is a span: a sequence with drafts has one for
    each of its positions, over the same blocks. Rows beyond the plan's are padding: token 0 at
    position 0 of the trash block, whose logits mean nothing. Every row is sampled: the plan's row i
    is row i of the logits. One step's numbers are overwritten by the next one's, so both are
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
        """Enqueues the upload of a plan whose chunks all decode, or which has none.

        Raises Internal when it has more tokens than rows, or more of either than there is memory
        for.
        """
        chunks = plan.chunks
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        count = len(token_ids)
        if not count <= rows <= self._max_rows:
            raise Internal(f"{count} tokens in a batch of {rows} rows")
        tables = self._tables.take(plan, self._block_size)
        if max(map(len, tables), default=0) > self._max_blocks:
            raise Internal(f"a sequence has more than {self._max_blocks} blocks")
        tables.append(np.array([self._trash_block], dtype=np.int32))
        starts = np.cumsum([0, *map(len, tables)])
        counts = replace(self._counts(rows), blocks=int(starts[-1]))
        host, arrays = counts.host_buffer(self._buffer.device)
        np.concatenate(tables, out=arrays["tables"])
        lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
        firsts = np.array([chunk.first_position for chunk in chunks], dtype=np.int64)
        positions = np.zeros(rows, dtype=np.int64)
        shifts = firsts + lengths - np.cumsum(lengths)
        positions[:count] = np.arange(count) + np.repeat(shifts, lengths)
        table_starts = np.repeat(starts[:-1], np.append(lengths, rows - count))
        size = self._block_size
        arrays["token_ids"][:count] = token_ids
        arrays["token_ids"][count:] = 0
        arrays["positions"][:] = arrays["first_positions"][:] = positions
        arrays["ends"][:] = positions + 1
        arrays["table_starts"][:] = table_starts
        blocks = arrays["tables"][table_starts + positions // size]
        arrays["places"][:] = blocks * size + positions % size
        arrays["sampled"][:] = arrays["first_rows"][:] = range(rows)
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        return self.tensors(rows)

    def _counts(self, rows: int) -> Counts:
        blocks = rows * self._max_blocks + 1
        return Counts(rows=rows, sampled=rows, spans=rows, tiles=0, blocks=blocks, lone=rows)
