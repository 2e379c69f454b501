"""Copies KV into block-major memory and between it and the wire's layout, one kernel each."""

from __future__ import annotations

import torch
import triton.language as tl

from batonlm.engine.attention.triton.jit import jit, jit_of_any
from batonlm.engine.attention.triton.scaled import code_of, largest_bits, scale_of
from batonlm.engine.attention.triton.shapes import memory_constants

_PLACES = 16


def write(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Scatters rows of one layer: keys [kv_heads, T, D] and values [kv_heads, T, Dv] to places.

    places: int32 [T]. Targets: [blocks, kv_heads, block_size, D] and [.., Dv], one layer of a
    `BlockCache`; Dv is 0 of latents, whose values are not kept. Where they hold codes, scales are
    written too.
    """
    count = len(places)
    _write[(-(-count // _PLACES), keys.shape[1])](
        source_keys,
        source_values,
        places,
        keys,
        values,
        count,
        source_keys.stride(0),
        source_keys.stride(1),
        source_values.stride(0),
        source_values.stride(1),
        keys.stride(0),
        **memory_constants(keys, values),
        PLACES=_PLACES,
    )


def transfer(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    wire: torch.Tensor,
    among: tuple[int, int] | None = None,
    *,
    packing: bool,
) -> None:
    """Fills wire, flat, with the places' KV of all layers as [layer][k, v][place][head][element],
    codes with their scales behind; or, unless packing, fills the places with wire's KV.

    keys: [blocks, layers, kv_heads, block_size, D], values: [.., Dv]. places: int32 [N]. among:
    which of the wire's heads the first one here is, and how many the wire has; None: the same.
    """
    count, layers, kv_heads = len(places), keys.shape[1], keys.shape[2]
    first_head, wire_heads = among or (0, kv_heads)
    _wire[(-(-count // _PLACES), layers, kv_heads)](
        keys,
        values,
        places,
        wire,
        count,
        first_head,
        wire_heads,
        keys.stride(0),
        keys.stride(1),
        **memory_constants(keys, values),
        PLACES=_PLACES,
        PACKING=packing,
    )


# The number of rows varies from step to step: a kernel for each kind of number (one, multiples of
# 16, others) would be compiled while requests wait.
@jit_of_any("count")
def _write(
    source_keys: tl.tensor,
    source_values: tl.tensor,
    places: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    key_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    block_stride: tl.tensor,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Program (i, h): PLACES rows of head h."""
    head = tl.program_id(1)
    row = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    live = row < count
    place = tl.load(places + row, mask=live, other=0)
    block = (place // BLOCK_SIZE).to(tl.int64) * block_stride
    offset = head * BLOCK_SIZE + place % BLOCK_SIZE
    row = row.to(tl.int64)
    key_rows = source_keys + head.to(tl.int64) * key_head_stride
    value_rows = source_values + head.to(tl.int64) * value_head_stride
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        scales = keys + tl.num_programs(1) * BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE) + block + offset
        _narrow(
            key_rows, row * key_row_stride, keys, block + offset * KEY_SIZE, scales,
            live, KEY_SIZE, KEY_PADDED,
        )  # fmt: skip
        _narrow(
            value_rows, row * value_row_stride, values, block + offset * VALUE_SIZE,
            scales + tl.num_programs(1) * BLOCK_SIZE, live, VALUE_SIZE, VALUE_PADDED,
        )  # fmt: skip
        return
    _move(
        key_rows, row * key_row_stride, keys, block + offset * KEY_SIZE,
        live, KEY_SIZE, KEY_PADDED,
    )  # fmt: skip
    if VALUE_SIZE > 0:
        _move(
            value_rows, row * value_row_stride, values, block + offset * VALUE_SIZE,
            live, VALUE_SIZE, VALUE_PADDED,
        )  # fmt: skip


@jit_of_any("count", "first_head", "wire_heads")
def _wire(
    keys: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    wire: tl.tensor,
    count: tl.tensor,
    first_head: tl.tensor,
    wire_heads: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    PACKING: tl.constexpr,
) -> None:
    """Program (i, l, h): PLACES places of layer l and head h, to the wire or from it."""
    layer = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    heads = tl.num_programs(2)
    row = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    live = row < count
    place = tl.load(places + row, mask=live, other=0)
    block = (place // BLOCK_SIZE).to(tl.int64) * block_stride + layer * layer_stride
    offset = head * BLOCK_SIZE + place % BLOCK_SIZE
    row = row.to(tl.int64) * wire_heads + first_head + head
    # In elements of one layer's part of the wire, keys come before values.
    rows = count.to(tl.int64) * wire_heads
    SCALED: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    start = wire + layer * rows * (KEY_SIZE + VALUE_SIZE + 2 * SCALED)
    key_spots, value_spots = block + offset * KEY_SIZE, block + offset * VALUE_SIZE
    sent_values = start + rows * KEY_SIZE
    if PACKING:
        _move(keys, key_spots, start, row * KEY_SIZE, live, KEY_SIZE, KEY_PADDED)
    else:
        _move(start, row * KEY_SIZE, keys, key_spots, live, KEY_SIZE, KEY_PADDED)
    if VALUE_SIZE == 0:
        return
    if PACKING:
        _move(values, value_spots, sent_values, row * VALUE_SIZE, live, VALUE_SIZE, VALUE_PADDED)
    else:
        _move(sent_values, row * VALUE_SIZE, values, value_spots, live, VALUE_SIZE, VALUE_PADDED)
    if SCALED:
        kept = keys + heads * BLOCK_SIZE * (KEY_SIZE + VALUE_SIZE) + block + offset
        sent = sent_values + rows * VALUE_SIZE + row
        for _ in tl.static_range(2):
            if PACKING:
                tl.store(sent, tl.load(kept, mask=live), mask=live)
            else:
                tl.store(kept, tl.load(sent, mask=live), mask=live)
            kept += heads * BLOCK_SIZE
            sent += rows


@jit
def _move(
    source: tl.tensor,
    source_spots: tl.tensor,
    target: tl.tensor,
    target_spots: tl.tensor,
    live: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Copies the rows of SIZE elements that are live; spots: where each begins, [rows]."""
    element = tl.arange(0, PADDED)
    mask = live[:, None] & (element < SIZE)[None, :]
    found = tl.load(source + source_spots[:, None] + element[None, :], mask=mask)
    tl.store(target + target_spots[:, None] + element[None, :], found, mask=mask)


@jit
def _narrow(
    source: tl.tensor,
    source_spots: tl.tensor,
    target: tl.tensor,
    target_spots: tl.tensor,
    scales: tl.tensor,
    live: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """As `_move`, of numbers that become codes; scales: where each row's goes, [rows]."""
    element = tl.arange(0, PADDED)
    mask = live[:, None] & (element < SIZE)[None, :]
    found = tl.load(source + source_spots[:, None] + element[None, :], mask=mask, other=0.0)
    number = found.to(tl.float32)
    codes: tl.constexpr = target.dtype.element_ty
    scale = scale_of(largest_bits(number), codes)
    tl.store(scales, scale.to(codes), mask=live)
    code = code_of(number, scale[:, None], codes)
    tl.store(target + target_spots[:, None] + element[None, :], code, mask=mask)
