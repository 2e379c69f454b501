"""The copying kernels against what plain torch does with the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.request.model import SCALED_FP8, KvLayout
from batonlm.engine.attention.triton import copies
from batonlm.engine.kv.cache import BlockCache, Heads, parts_of
from tests.engine.devices import CUDA, INTERPRETER

CPU = torch.device("cpu")
PLACES = [0, 33, 95, *range(40, 56), 7]


def caches(layout: KvLayout, device: str, block_size: int) -> tuple[BlockCache, BlockCache]:
    """The same random content twice: on the CPU, where torch copies, and for the kernels."""
    plain = BlockCache(layout, 96 // block_size, block_size, CPU)
    plain.storage.copy_(torch.randn(plain.storage.shape))
    other = BlockCache(layout, 96 // block_size, block_size, torch.device(device))
    other.storage.copy_(plain.storage)
    return plain, other


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("count", "value_size"), [(1, 16), (16, 16), (20, 16), (20, 0)])
def test_rows_are_written_as_by_torch(
    dtype: str, block_size: int, count: int, value_size: int, device: str
) -> None:
    layout = KvLayout("d", dtype, 2, 2, 24, value_size)
    plain, kernel = caches(layout, device, block_size)
    places = torch.tensor(PLACES[:count], dtype=torch.int32)
    # One transposed, as most models give it, and one a slice of something wider.
    keys = torch.randn(count, 2, 24).to(plain.storage.dtype).transpose(0, 1)
    values = torch.randn(2, count, 40).to(plain.storage.dtype)[:, :, 8:24]
    plain.write(1, places, keys, values)
    copies.write(keys.to(device), values.to(device), places.to(device), *kernel.layer(1))
    assert torch.equal(kernel.storage.cpu(), plain.storage)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize(("key_size", "value_size"), [(64, 64), (24, 16), (16, 80), (40, 0)])
@pytest.mark.parametrize("count", [1, 20])
def test_the_wire_is_filled_and_emptied_as_by_torch(
    key_size: int, value_size: int, count: int, device: str
) -> None:
    layout = KvLayout("d", "float32", 3, 2, key_size, value_size)
    plain, kernel = caches(layout, device, 16)
    table = ((4, 1), (0, 1))
    wire = plain.gather(table, 3, count)
    places = torch.tensor([64 + p if p < 16 else p - 16 for p in range(3, 3 + count)])
    places = places.int().to(device)
    packed = torch.empty_like(wire, device=device)
    copies.transfer(kernel.keys, kernel.values, places, packed, packing=True)
    assert torch.equal(packed.cpu(), wire)
    fresh = torch.randn(wire.shape)
    plain.scatter(table, 3, count, fresh)
    copies.transfer(kernel.keys, kernel.values, places, fresh.to(device), packing=False)
    assert torch.equal(kernel.storage.cpu(), plain.storage)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize(
    ("dtype", "value_size"), [("float32", 16), ("float32", 0), (SCALED_FP8, 16)]
)
def test_heads_among_others_are_those_of_the_wire(dtype: str, value_size: int, device: str) -> None:
    """A rank's part of a payload over all heads; what is of others stays."""
    layout, among, count = KvLayout("d", dtype, 3, 2, 24, value_size), Heads(3, 6), 20
    plain, kernel = (
        BlockCache(layout, 6, 16, torch.device(where), kernels=kernels)
        for where, kernels in (("cpu", False), (device, True))
    )
    stored = torch.randint(0, 100, plain.storage.view(torch.uint8).shape, dtype=torch.uint8)
    for cache in (plain, kernel):
        cache.storage.view(torch.uint8).copy_(stored)
    table = ((4, 1), (0, 1))
    whole = replace(layout, num_kv_heads=among.of)
    wire = torch.randint(0, 100, (count * whole.bytes_per_position,), dtype=torch.uint8)
    wire = wire.view(plain.storage.dtype)
    for packing in (True, False):
        given, taken = wire.clone(), wire.clone().to(device)
        plain.transfer(table, 3, count, given, among, packing=packing)
        kernel.transfer(table, 3, count, taken, among, packing=packing)
        assert torch.equal(taken.cpu().view(torch.uint8), given.view(torch.uint8))
        assert torch.equal(given, wire) is not packing
        assert torch.equal(kernel.storage.cpu(), plain.storage)
    for part, own in zip(
        parts_of(whole, count, given), parts_of(layout, count, given, among), strict=True
    ):
        assert torch.equal(part[:, :, 3:5], own)
    assert torch.equal(plain.gather(table, 3, count), _flat(parts_of(layout, count, given, among)))


def _flat(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], 1).view(-1)
