"""Paged attention of chunks: tiles of queries at consecutive positions of one sequence.

Tiles lie at multiples of their size, counted in positions of the sequence. What a row reads thus
depends on its position, never on how its prompt was cut into chunks. With `NESTED` it goes further
and repeats what decode does: the same tiles, the same parts, merged in the same order. A row then
has the bits that decode would give it.
"""

from __future__ import annotations

import torch
import triton.language as tl

from batonlm.engine.attention.interface import LayerArguments
from batonlm.engine.attention.triton.jit import jit
from batonlm.engine.attention.triton.shapes import TileShape, memory_constants
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


def prefill_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tensors: StepTensors,
    arguments: LayerArguments,
    shape: TileShape,
    output: torch.Tensor,
    *,
    per_head: int,
    parts: int,
) -> None:
    """Writes the rows of the step's other spans to output; shapes as for `decode_attention`.

    per_head: query heads of a tile, all that share a KV head or some of them. parts: 0, or the most
    parts a sequence is cut into when decode's bits are wanted; shape is then decode's.
    """
    groups = query.shape[0] // per_head
    _prefill[(len(tensors.tiles), groups)](
        query,
        keys,
        values,
        tensors.first_rows,
        tensors.first_positions,
        tensors.ends,
        tensors.table_starts,
        tensors.tables,
        tensors.tiles,
        output if arguments.sinks is None else arguments.sinks,
        output,
        arguments.score_factor,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        PER_HEAD=per_head,
        ROWS=shape.rows,
        POSITIONS=shape.positions(per_head),
        PARTS=parts,
        **memory_constants(keys, values, latent=arguments.latent),
        LATENT=arguments.latent,
        SPLIT=groups // keys.shape[1],
        KEYS=shape.keys,
        WINDOW=arguments.window or 0,
        SOFTCAP=arguments.softcap or 0.0,
        SINKS=arguments.sinks is not None,
        NESTED=parts > 0,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@jit
def _prefill(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    first_rows: tl.tensor,
    first_positions: tl.tensor,
    ends: tl.tensor,
    table_starts: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    target: tl.tensor,
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
    SINKS: tl.constexpr,
    NESTED: tl.constexpr,
) -> None:
    """Program (n, g): tile n for group g of query heads, of which every KV head has SPLIT. A tile's
    rows go position by position, then by head."""
    group = tl.program_id(1)
    kv_head = group // SPLIT
    span = tl.load(tiles + 2 * tl.program_id(0))
    lowest = tl.load(tiles + 2 * tl.program_id(0) + 1) * POSITIONS
    first_position = tl.load(first_positions + span)
    end = tl.load(ends + span)
    table = tables + tl.load(table_starts + span)
    row = tl.arange(0, ROWS)
    position = lowest + row // PER_HEAD
    live = (row < POSITIONS * PER_HEAD) & (position >= first_position) & (position < end)
    head = group * PER_HEAD + row % PER_HEAD
    batch_row = (tl.load(first_rows + span) + position - first_position).to(tl.int64)
    spots = batch_row * query_row_stride + head.to(tl.int64) * query_head_stride
    queries = load_queries(
        query, spots, live, KEY_SIZE, KEY_PADDED, VALUE_SIZE, VALUE_PADDED, LATENT
    )
    memory = head_memory(
        table, keys, values, kv_head, tl.num_programs(1), block_stride,
        KEY_SIZE, VALUE_SIZE, BLOCK_SIZE,
    )  # fmt: skip
    scoring = (scale, WINDOW, SOFTCAP)
    first = first_seen(lowest, WINDOW)
    low = first // KEYS * KEYS
    high = tl.minimum(lowest + POSITIONS, end)
    nothing = unseen(ROWS, VALUE_PADDED)
    state = nothing
    if NESTED:
        size = part_size(lowest, POSITIONS, PARTS, WINDOW)
        for number in range(first // size, (high - 1) // size + 1):
            start = tl.maximum(number * size, low)
            stop = tl.minimum(number * size + size, high)
            part = attend(
                nothing, queries, position, start, stop, end, memory, scoring, KEYS, LATENT, False
            )
            state = fold(state, part)
    else:
        # All rows see all keys before the tile itself, unless a window ends somewhere there.
        middle = low
        if WINDOW == 0:
            middle = lowest // KEYS * KEYS
            state = attend(
                state, queries, position, low, middle, end, memory, scoring, KEYS, LATENT, True
            )
        state = attend(
            state, queries, position, middle, high, end, memory, scoring, KEYS, LATENT, False
        )
    output = finish(state, sinks, head, live, SINKS)
    value_element = tl.arange(0, VALUE_PADDED)
    heads = tl.num_programs(1) * PER_HEAD
    spots = batch_row * heads + head
    tl.store(
        target + spots[:, None] * VALUE_SIZE + value_element[None, :],
        output,
        mask=live[:, None] & (value_element < VALUE_SIZE)[None, :],
    )
