"""Copies KV into block-major memory and between it and the wire's layout, one kernel each.

Knows places (block id x block size + offset) and shapes; neither extents nor owners.
"""

from __future__ import annotations

import torch
import triton.language as tl

from baton.engine.triton.jit import jit_of_any
from baton.engine.triton.shapes import padded

_PLACES = 16


def write(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Scatters rows of one layer: keys [kv_heads, T, D] and values [kv_heads, T, Dv] to places.

    places: int32 [T]. Targets: [blocks, kv_heads, block_size, D] and [.., Dv], one layer.
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
        KEY_SIZE=keys.shape[-1],
        KEY_PADDED=padded(keys.shape[-1]),
        VALUE_SIZE=values.shape[-1],
        VALUE_PADDED=padded(values.shape[-1]),
        BLOCK_SIZE=keys.shape[2],
        PLACES=_PLACES,
    )


def pack(
    keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, wire: torch.Tensor
) -> None:
    """Fills wire, flat, with the places' KV of all layers as [layer][k, v][place][head][element].

    keys: [blocks, layers, kv_heads, block_size, D], values: [.., Dv]. places: int32 [N].
    """
    _transfer(keys, values, places, wire, packing=True)


def unpack(
    keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, wire: torch.Tensor
) -> None:
    """The inverse of pack."""
    _transfer(keys, values, places, wire, packing=False)


def _transfer(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    wire: torch.Tensor,
    *,
    packing: bool,
) -> None:
    count, layers, kv_heads = len(places), keys.shape[1], keys.shape[2]
    _wire[(-(-count // _PLACES), layers, kv_heads)](
        keys,
        values,
        places,
        wire,
        count,
        keys.stride(0),
        keys.stride(1),
        KEY_SIZE=keys.shape[-1],
        KEY_PADDED=padded(keys.shape[-1]),
        VALUE_SIZE=values.shape[-1],
        VALUE_PADDED=padded(values.shape[-1]),
        BLOCK_SIZE=keys.shape[3],
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
    element = tl.arange(0, KEY_PADDED)
    mask = live[:, None] & (element < KEY_SIZE)[None, :]
    start = source_keys + head.to(tl.int64) * key_head_stride
    found = tl.load(start + (row * key_row_stride)[:, None] + element[None, :], mask=mask)
    tl.store(keys + (block + offset * KEY_SIZE)[:, None] + element[None, :], found, mask=mask)
    element = tl.arange(0, VALUE_PADDED)
    mask = live[:, None] & (element < VALUE_SIZE)[None, :]
    start = source_values + head.to(tl.int64) * value_head_stride
    found = tl.load(start + (row * value_row_stride)[:, None] + element[None, :], mask=mask)
    tl.store(values + (block + offset * VALUE_SIZE)[:, None] + element[None, :], found, mask=mask)


@jit_of_any("count")
def _wire(
    keys: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    wire: tl.tensor,
    count: tl.tensor,
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
    row = row.to(tl.int64) * heads + head
    # In elements of one layer's part of the wire, keys come before values.
    rows = count.to(tl.int64) * heads
    start = wire + layer * rows * (KEY_SIZE + VALUE_SIZE)
    element = tl.arange(0, KEY_PADDED)
    mask = live[:, None] & (element < KEY_SIZE)[None, :]
    stored = keys + (block + offset * KEY_SIZE)[:, None] + element[None, :]
    sent = start + (row * KEY_SIZE)[:, None] + element[None, :]
    if PACKING:
        tl.store(sent, tl.load(stored, mask=mask), mask=mask)
    else:
        tl.store(stored, tl.load(sent, mask=mask), mask=mask)
    element = tl.arange(0, VALUE_PADDED)
    mask = live[:, None] & (element < VALUE_SIZE)[None, :]
    stored = values + (block + offset * VALUE_SIZE)[:, None] + element[None, :]
    sent = start + rows * KEY_SIZE + (row * VALUE_SIZE)[:, None] + element[None, :]
    if PACKING:
        tl.store(sent, tl.load(stored, mask=mask), mask=mask)
    else:
        tl.store(stored, tl.load(sent, mask=mask), mask=mask)
