"""Merges the states that decode left of a sequence's parts into attention's output."""

from __future__ import annotations

import torch
import triton.language as tl

from baton.engine.triton.arguments import Scores, Sequences
from baton.engine.triton.jit import jit
from baton.engine.triton.shapes import TileShape, padded
from baton.engine.triton.tiles import finish, first_seen, fold, part_size

_UNROLLED = 4


class Parts:
    """Memory for the states of all parts of up to `sequences` sequences.

    top, total: float32 [sequences, kv_heads, parts, per_head]; output: the same and value_size.
    """

    def __init__(
        self,
        sequences: int,
        kv_heads: int,
        parts: int,
        per_head: int,
        value_size: int,
        device: torch.device,
    ):
        shape = (sequences, kv_heads, parts, per_head)
        self.parts = parts
        self.top = torch.empty(shape, dtype=torch.float32, device=device)
        self.total = torch.empty(shape, dtype=torch.float32, device=device)
        self.output = torch.empty((*shape, value_size), dtype=torch.float32, device=device)


def merge_parts(
    parts: Parts, sequences: Sequences, scores: Scores, shape: TileShape, output: torch.Tensor
) -> None:
    """Writes the sequences' rows of output, [T, heads, Dv] and contiguous."""
    _, kv_heads, most, per_head = parts.top.shape
    _merge[(len(sequences.ends), kv_heads)](
        parts.top,
        parts.total,
        parts.output,
        sequences.first_rows,
        sequences.ends,
        output if scores.sinks is None else scores.sinks,
        output,
        PER_HEAD=per_head,
        ROWS=shape.rows,
        POSITIONS=shape.positions(per_head),
        PARTS=most,
        VALUE_SIZE=output.shape[-1],
        VALUE_PADDED=padded(output.shape[-1]),
        WINDOW=scores.window,
        SINKS=scores.sinks is not None,
        UNROLLED=_UNROLLED,
        num_warps=shape.warps,
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
    """Program (s, h): the output of sequence s and KV head h, its parts taken in their order."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    end = tl.load(ends + sequence)
    size = part_size(end - 1, POSITIONS, PARTS, WINDOW)
    count = (end - 1) // size + 1 - first_seen(end - 1, WINDOW) // size
    row = tl.arange(0, ROWS)
    live = row < PER_HEAD
    element = tl.arange(0, VALUE_PADDED)
    mask = live[:, None] & (element < VALUE_SIZE)[None, :]
    base = (sequence * tl.num_programs(1) + kv_head).to(tl.int64) * PARTS
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUE_PADDED), tl.float32)
    for group in range(0, count, UNROLLED):
        # Unrolled, so that the loads of several parts are under way at once.
        for i in tl.static_range(UNROLLED):
            there = group + i < count
            spots = (base + group + i) * PER_HEAD + row
            top, total, output = fold(
                top,
                total,
                output,
                tl.load(tops + spots, mask=live & there, other=float("-inf")),
                tl.load(totals + spots, mask=live & there, other=0.0),
                tl.load(
                    outputs + spots[:, None] * VALUE_SIZE + element[None, :],
                    mask=mask & there,
                    other=0.0,
                ),
            )
    heads = kv_head * PER_HEAD + row
    output = finish(top, total, output, sinks, heads, live, SINKS)
    first_row = tl.load(first_rows + sequence).to(tl.int64)
    spots = first_row * tl.num_programs(1) * PER_HEAD + heads
    tl.store(target + spots[:, None] * VALUE_SIZE + element[None, :], output, mask=mask)
