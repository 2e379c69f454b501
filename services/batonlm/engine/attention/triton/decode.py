"""Paged attention of single queries, each split over its sequence's parts and merged after.

A decode step reads all KV of its sequences once and computes little, so that what counts is that
all of a GPU reads: one sequence's parts go to several programs (flash decoding: Dao, Haziza, Massa,
Sizov, 2023). All query heads of a KV head make one tile, so that KV is read once for all of them.

How a sequence is cut depends on its own length alone, and what a program makes of a part does not
depend on which program it is: no result depends on the batch. Grids depend on the number of
queries only, so that a CUDA graph of a batch size serves all lengths.

A sequence with drafts has several queries, one a position. Each is computed as if it were alone, so
with the bits that it has without drafts, and the same graphs serve it. All read the keys before
them; their programs lie side by side in the grid, so that what one reads the others may find in the
GPU's cache.
"""

from __future__ import annotations

import torch
import triton.language as tl

from batonlm.engine.attention.interface import LayerArguments
from batonlm.engine.attention.triton.jit import jit
from batonlm.engine.attention.triton.shapes import TileShape, memory_constants, padded
from batonlm.engine.attention.triton.steps import StepTensors
from batonlm.engine.attention.triton.tiles import (
    attend,
    finish,
    first_seen,
    fold,
    head_memory,
    load_queries,
    part_size,
    unseen,
)

_UNROLLED = 4


class PartStates:
    """Memory for the states of all parts of a number of queries."""

    def __init__(
        self,
        queries: int,
        groups: int,
        parts: int,
        per_head: int,
        value_size: int,
        device: torch.device,
    ):
        """groups: of per_head query heads each, that one program computes."""
        shape = (queries, groups, parts, per_head)
        self.top = torch.empty(shape, dtype=torch.float32, device=device)
        self.total = torch.empty(shape, dtype=torch.float32, device=device)
        self.output = torch.empty((*shape, value_size), dtype=torch.float32, device=device)


# Programs that fill any GPU several times over: a query gets as many as fit this.
_PROGRAMS = 2048


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tensors: StepTensors,
    arguments: LayerArguments,
    shape: TileShape,
    parts: PartStates,
    output: torch.Tensor,
) -> None:
    """Writes the rows of the step's lone spans to output, [T, heads, Dv] and contiguous.

    query [heads, T, D], its last dimension contiguous. keys [blocks, kv_heads, block_size, D] and
    values [.., Dv]: one layer of block-major memory, see `BlockCache`; of latents,
    values are a view of keys. parts: memory for at least as many queries.
    """
    _, groups, most_parts, per_head = parts.top.shape
    programs = max(1, min(most_parts, _PROGRAMS // (tensors.lone * groups)))
    _decode[(tensors.lone, groups, programs)](
        query,
        keys,
        values,
        tensors.first_rows,
        tensors.ends,
        tensors.table_starts,
        tensors.tables,
        parts.top,
        parts.total,
        parts.output,
        arguments.score_factor,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        PER_HEAD=per_head,
        ROWS=shape.rows,
        POSITIONS=shape.positions(per_head),
        PARTS=most_parts,
        **memory_constants(keys, values, latent=arguments.latent),
        LATENT=arguments.latent,
        SPLIT=groups // keys.shape[1],
        KEYS=shape.keys,
        WINDOW=arguments.window or 0,
        SOFTCAP=arguments.softcap or 0.0,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    _merge[(tensors.lone, groups)](
        parts.top,
        parts.total,
        parts.output,
        tensors.first_rows,
        tensors.ends,
        output if arguments.sinks is None else arguments.sinks,
        output,
        PER_HEAD=per_head,
        ROWS=shape.rows,
        POSITIONS=shape.positions(per_head),
        PARTS=most_parts,
        VALUE_SIZE=output.shape[-1],
        VALUE_PADDED=padded(output.shape[-1]),
        WINDOW=arguments.window or 0,
        SINKS=arguments.sinks is not None,
        UNROLLED=_UNROLLED,
        num_warps=shape.warps,
    )


@jit
def _decode(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    first_rows: tl.tensor,
    ends: tl.tensor,
    table_starts: tl.tensor,
    tables: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    outputs: tl.tensor,
    scale: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    block_stride: tl.tensor,
    PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Program (s, g, z): the states of parts z, z + programs, .. of what span s sees, for group g
    of query heads, of which every KV head has SPLIT."""
    span = tl.program_id(0)
    group = tl.program_id(1)
    kv_head = group // SPLIT
    end = tl.load(ends + span)
    first = first_seen(end - 1, WINDOW)
    size = part_size(end - 1, POSITIONS, PARTS, WINDOW)
    first_part = first // size
    count = (end - 1) // size + 1 - first_part
    if tl.program_id(2) >= count:
        return
    row = tl.arange(0, ROWS)
    live = row < PER_HEAD
    row_start = query + tl.load(first_rows + span).to(tl.int64) * query_row_stride
    heads = (group * PER_HEAD + row).to(tl.int64) * query_head_stride
    queries = load_queries(
        row_start, heads, live, KEY_SIZE, KEY_PADDED, VALUE_SIZE, VALUE_PADDED, LATENT
    )
    position = tl.zeros((ROWS,), tl.int32) + (end - 1)
    table = tables + tl.load(table_starts + span)
    value_element = tl.arange(0, VALUE_PADDED)
    base = (span * tl.num_programs(1) + group).to(tl.int64) * PARTS
    nothing = unseen(ROWS, VALUE_PADDED)
    for part in range(tl.program_id(2), count, tl.num_programs(2)):
        low = (first_part + part) * size
        start = tl.maximum(low, first // KEYS * KEYS)
        stop = tl.minimum(low + size, end)
        memory = head_memory(
            table, keys, values, kv_head, tl.num_programs(1), block_stride,
            KEY_SIZE, VALUE_SIZE, BLOCK_SIZE,
        )  # fmt: skip
        scoring = (scale, WINDOW, SOFTCAP)
        top, total, output = attend(
            nothing, queries, position, start, stop, end, memory, scoring, KEYS, LATENT, False
        )
        spots = (base + part) * PER_HEAD + row
        tl.store(tops + spots, top, mask=live)
        tl.store(totals + spots, total, mask=live)
        tl.store(
            outputs + spots[:, None] * VALUE_SIZE + value_element[None, :],
            output,
            mask=live[:, None] & (value_element < VALUE_SIZE)[None, :],
        )


@jit
def _merge(
    tops: tl.tensor,
    totals: tl.tensor,
    outputs: tl.tensor,
    first_rows: tl.tensor,
    ends: tl.tensor,
    sinks: tl.tensor,
    target: tl.tensor,
    PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    UNROLLED: tl.constexpr,
) -> None:
    """Program (s, g): the output of span s and group g of query heads, its parts taken in their
    order."""
    span = tl.program_id(0)
    group = tl.program_id(1)
    end = tl.load(ends + span)
    size = part_size(end - 1, POSITIONS, PARTS, WINDOW)
    count = (end - 1) // size + 1 - first_seen(end - 1, WINDOW) // size
    row = tl.arange(0, ROWS)
    live = row < PER_HEAD
    element = tl.arange(0, VALUE_PADDED)
    mask = live[:, None] & (element < VALUE_SIZE)[None, :]
    base = (span * tl.num_programs(1) + group).to(tl.int64) * PARTS
    state = unseen(ROWS, VALUE_PADDED)
    for first in range(0, count, UNROLLED):
        # Unrolled, so that the loads of several parts are under way at once.
        for i in tl.static_range(UNROLLED):
            there = first + i < count
            spots = (base + first + i) * PER_HEAD + row
            part = (
                tl.load(tops + spots, mask=live & there, other=float("-inf")),
                tl.load(totals + spots, mask=live & there, other=0.0),
                tl.load(
                    outputs + spots[:, None] * VALUE_SIZE + element[None, :],
                    mask=mask & there,
                    other=0.0,
                ),
            )
            state = fold(state, part)
    heads = group * PER_HEAD + row
    output = finish(state, sinks, heads, live, SINKS)
    first_row = tl.load(first_rows + span).to(tl.int64)
    spots = first_row * tl.num_programs(1) * PER_HEAD + heads
    tl.store(target + spots[:, None] * VALUE_SIZE + element[None, :], output, mask=mask)
