"""The copying kernels against what plain torch does with the same memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.request.model import KvLayout
from batonlm.engine.attention.triton import copies
from batonlm.engine.kv.cache import BlockCache
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
