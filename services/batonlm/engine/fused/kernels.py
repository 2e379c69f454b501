"""The decoder's operators as Triton kernels over block-major memory: one launch each.

A program computes whole rows, and which rows are beside them never shows in what it computes. Sums
are float32; results are rounded to the model's type where transformers rounds them.
"""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from torch import nn

from batonlm.engine.attention.interface import AttentionContext
from batonlm.engine.attention.triton.backend import TritonStep
from batonlm.engine.attention.triton.jit import jit, jit_of_any
from batonlm.engine.attention.triton.scaled import code_of, largest_bits, scale_of
from batonlm.engine.attention.triton.shapes import padded
from batonlm.engine.fused.decoder import Heads, Rotation
from batonlm.engine.fused.experts import GroupedExperts, clamped_gate, route
from batonlm.engine.fused.recipe import Mixture, Recipe

ROWS = 16
"""Rows of one head that a program of `_place` computes."""
WARPS = 4
"""Of that program."""
ELEMENTS = 1024
"""Elements of a row that a program of `_gate` computes."""
_PER_WARP = 512
"""Elements of a row for each warp of a norm's program."""


def norm_warps(width: int) -> int:
    """Of the program that computes the norm of so many elements."""
    return min(max(width // _PER_WARP, 1), 16)


def head_constants(size: int, rotated: int) -> dict[str, int]:
    """How `_place` takes a head of `size` elements, the first `rotated` of which turn: as two
    halves and a rest. Without a rotation the halves are those of the head."""
    half = (rotated or size) // 2
    rest = size - 2 * half
    return {
        "HALF": half,
        "HALF_PADDED": padded(half),
        "REST": rest,
        "REST_PADDED": padded(max(rest, 1)),
        "ROTATES": int(rotated > 0),
    }


class TritonOperators:
    """Operators whose contexts are `TritonStep` of a TritonBackend."""

    def __init__(self, recipe: Recipe, *, exact: bool = False):
        """exact: whether a row's bits must not depend on how many rows there are."""
        self._epsilon = recipe.epsilon
        self._wide_scale = recipe.wide_scale
        self._exact = exact

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, None, weight)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return self._norm(hidden, delta, weight)

    def _norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        count, size = hidden.shape
        output = torch.empty_like(hidden)
        width = padded(size)
        _add_norm[(count,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            output,
            self._epsilon,
            SIZE=size,
            PADDED=width,
            ADDS=delta is not None,
            WIDE_SCALE=self._wide_scale,
            num_warps=norm_warps(width),
        )
        return output

    def attend(
        self, context: AttentionContext, heads: Heads, merged: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        assert isinstance(context, TritonStep)
        places = context.places
        keys, values = context.memory(heads.arguments.layer)
        size = keys.shape[-1]
        rotated = rotation.cosines.shape[-1] if heads.rotated else 0
        normed = heads.query_norm is not None
        _place[(-(-len(places) // ROWS), heads.queries + 2 * heads.keys)](
            merged,
            merged if heads.query_norm is None else heads.query_norm,
            merged if heads.key_norm is None else heads.key_norm,
            rotation.cosines,
            rotation.sines,
            places,
            keys,
            values,
            len(places),
            self._epsilon,
            keys.stride(0),
            QUERIES=heads.queries,
            KV_HEADS=heads.keys,
            **head_constants(size, rotated),
            BLOCK_SIZE=keys.shape[-2],
            NORMS=normed,
            WIDE_SCALE=self._wide_scale,
            ROWS=ROWS,
            num_warps=WARPS,
        )
        query = merged.view(len(merged), -1, size)[:, : heads.queries].transpose(0, 1)
        return context.attend(heads.arguments, query).flatten(1)

    def gate(self, merged: torch.Tensor) -> torch.Tensor:
        count, size = merged.shape[0], merged.shape[1] // 2
        output = merged.new_empty(count, size)
        _gate[(count, -(-size // ELEMENTS))](merged, output, SIZE=size, ELEMENTS=ELEMENTS)
        return output

    def route(self, logits: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, mixture.choices, normalised=mixture.normalised)

    def experts(self, own: nn.Module, mixture: Mixture) -> nn.Module:
        gate = self.gate
        if mixture.clamp is not None:
            alpha, limit = mixture.clamp
            gate = partial(clamped_gate, alpha=alpha, limit=limit)
        return GroupedExperts(own, gate, exact=self._exact)


@jit
def _add_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    WIDE_SCALE: tl.constexpr,
) -> None:
    """Program i: row i."""
    element = tl.arange(0, PADDED)
    there = element < SIZE
    spot = tl.program_id(0).to(tl.int64) * SIZE + element
    kind = hidden.dtype.element_ty
    row = tl.load(hidden + spot, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        row += tl.load(delta + spot, mask=there, other=0.0).to(tl.float32)
        row = _rounded(row, kind)
        tl.store(hidden + spot, row.to(kind), mask=there)
    scale = tl.load(weight + element, mask=there, other=0.0).to(tl.float32)
    normed = _scaled(row, tl.rsqrt(tl.sum(row * row, 0) / SIZE + epsilon), scale, kind, WIDE_SCALE)
    tl.store(output + spot, normed.to(kind), mask=there)


@jit_of_any("count")
def _place(
    merged: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    places: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    epsilon: tl.tensor,
    block_stride: tl.tensor,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
    WIDE_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program (i, h): ROWS rows of head h of queries, keys and values, in this order. Queries are
    written back, keys and values to their places in memory."""
    SIZE: tl.constexpr = 2 * HALF + REST
    HEADS: tl.constexpr = QUERIES + 2 * KV_HEADS
    kind = merged.dtype.element_ty
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    wide_row = row.to(tl.int64)
    source = merged + (wide_row * HEADS + head) * SIZE
    half = tl.arange(0, HALF_PADDED)
    rest = tl.arange(0, REST_PADDED)
    in_half = live[:, None] & (half < HALF)[None, :]
    in_rest = live[:, None] & (rest < REST)[None, :]
    first = tl.load(source[:, None] + half[None, :], mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
    third = tl.zeros((ROWS, REST_PADDED), tl.float32)
    if REST > 0:
        unturned = tl.load(source[:, None] + 2 * HALF + rest[None, :], mask=in_rest, other=0.0)
        third = unturned.to(tl.float32)
    if head < QUERIES + KV_HEADS:
        if NORMS:
            norm = query_norm if head < QUERIES else key_norm
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            squares += tl.sum(third * third, 1)
            scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
            first = _scaled(first, scale, _weight(norm, half, HALF), kind, WIDE_SCALE)
            second = _scaled(second, scale, _weight(norm + HALF, half, HALF), kind, WIDE_SCALE)
            third = _scaled(third, scale, _weight(norm + 2 * HALF, rest, REST), kind, WIDE_SCALE)
        if ROTATES:
            turn = (wide_row * (2 * HALF))[:, None] + half[None, :]
            cosine = tl.load(cosines + turn, mask=in_half, other=0.0).to(tl.float32)
            sine = tl.load(sines + HALF + turn, mask=in_half, other=0.0).to(tl.float32)
            left = _rounded(first * cosine, kind) - _rounded(second * sine, kind)
            second = _rounded(second * cosine, kind) + _rounded(first * sine, kind)
            first = left
    if head < QUERIES:
        _store(source, first, second, third, half, rest, in_half, in_rest, HALF, REST)
    else:
        place = tl.load(places + row, mask=live, other=0)
        block = (place // BLOCK_SIZE).to(tl.int64) * block_stride
        kv_head = (head - QUERIES) % KV_HEADS
        spot = block + (kv_head * BLOCK_SIZE + place % BLOCK_SIZE) * SIZE
        memory = keys if head < QUERIES + KV_HEADS else values
        codes: tl.constexpr = keys.dtype.element_ty
        if codes.primitive_bitwidth == 8:
            first, second = _rounded(first, kind), _rounded(second, kind)
            third = _rounded(third, kind)
            largest = tl.maximum(largest_bits(first), largest_bits(second))
            scale = scale_of(tl.maximum(largest, largest_bits(third)), codes)
            # Behind the layer's keys and values, first those of all keys.
            at = (2 * SIZE * KV_HEADS + head - QUERIES) * BLOCK_SIZE + place % BLOCK_SIZE
            tl.store(keys + block + at, scale.to(codes), mask=live)
            scale = scale[:, None]
            _store(
                memory + spot, code_of(first, scale, codes), code_of(second, scale, codes),
                code_of(third, scale, codes), half, rest, in_half, in_rest, HALF, REST,
            )  # fmt: skip
        else:
            _store(memory + spot, first, second, third, half, rest, in_half, in_rest, HALF, REST)


@jit
def _gate(merged: tl.tensor, output: tl.tensor, SIZE: tl.constexpr, ELEMENTS: tl.constexpr) -> None:
    """Program (i, j): ELEMENTS elements of row i."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = element < SIZE
    spot = row * (2 * SIZE) + element
    kind = merged.dtype.element_ty
    gate = tl.load(merged + spot, mask=there, other=0.0).to(tl.float32)
    up = tl.load(merged + SIZE + spot, mask=there, other=0.0).to(tl.float32)
    opened = _rounded(gate / (1.0 + tl.exp(-gate)), kind)
    tl.store(output + row * SIZE + element, (opened * up).to(kind), mask=there)


@jit
def _rounded(number: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """float32 numbers, each the nearest that `kind` has."""
    return number.to(kind).to(tl.float32)


@jit
def _scaled(
    row: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    kind: tl.constexpr,
    WIDE_SCALE: tl.constexpr,
) -> tl.tensor:
    if WIDE_SCALE:
        return _rounded(row * scale * weight, kind)
    else:
        return _rounded(_rounded(row * scale, kind) * weight, kind)


@jit
def _weight(weight: tl.tensor, element: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    found = tl.load(weight + element, mask=element < SIZE, other=0.0)
    return found.to(tl.float32)[None, :]


@jit
def _store(
    target: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    half: tl.tensor,
    rest: tl.tensor,
    in_half: tl.tensor,
    in_rest: tl.tensor,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Writes the parts of heads to where each row's head begins, target [ROWS]."""
    kind = target.dtype.element_ty
    start = target[:, None]
    tl.store(start + half[None, :], first.to(kind), mask=in_half)
    tl.store(start + HALF + half[None, :], second.to(kind), mask=in_half)
    if REST > 0:
        tl.store(start + 2 * HALF + rest[None, :], third.to(kind), mask=in_rest)
