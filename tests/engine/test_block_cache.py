"""Block-major memory: payloads are those of the other layout, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.model import KvLayout
from batonlm.engine.kv.cache import BlockCache, KvCache
from tests.engine.devices import CUDA

CPU = torch.device("cpu")
LAYOUT = KvLayout("d", "float32", 2, 3, 24, 16)
TABLE: Extents = ((7, 1), (2, 2))


def random_cache(
    device: torch.device, *, seed: int, num_blocks: int = 10, layout: KvLayout = LAYOUT
) -> BlockCache:
    cache = BlockCache(layout, num_blocks, 16, device)
    generator = torch.Generator().manual_seed(seed)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=generator))
    return cache


def payload(cache: BlockCache | KvCache, table: Extents, first: int, count: int) -> bytearray:
    packed = bytearray(count * cache.layout.bytes_per_position)
    cache.pack(table, first, count, memoryview(packed))
    return packed


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_payload_is_the_same_from_either_layout(dtype: str, device: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    blocks = random_cache(torch.device(device), seed=1, layout=layout)
    packed = payload(blocks, TABLE, 5, 30)
    heads = KvCache(layout, 6, 32, CPU)
    heads.unpack(((3, 2),), 5, 30, memoryview(packed))
    assert payload(heads, ((3, 2),), 5, 30) == packed
    for layer in range(2):
        keys, values = (memory[layer, :, 96 + 5 : 96 + 35] for memory in (heads.keys, heads.values))
        for position in range(5, 35):
            block, offset = (7, 2, 3)[position // 16], position % 16
            for memory, found in zip(blocks.layer(layer), (keys, values), strict=True):
                assert torch.equal(memory[block, :, offset].cpu(), found[:, position - 5])


@given(
    blocks=st.permutations(range(10)),
    span=st.tuples(st.integers(0, 159), st.integers(1, 160)).filter(lambda s: sum(s) <= 160),
)
@settings(max_examples=50)
def test_unpacking_writes_these_positions_and_no_others(
    blocks: list[int], span: tuple[int, int]
) -> None:
    first, count = span
    sender, taker = random_cache(CPU, seed=1), random_cache(CPU, seed=2)
    table = tuple((block, 1) for block in blocks)
    before = taker.storage.clone()
    packed = payload(sender, ((0, 10),), first, count)
    taker.unpack(table, first, count, memoryview(packed))
    assert payload(taker, table, first, count) == packed
    rest = BlockCache(LAYOUT, 10, 16, CPU)
    rest.storage.copy_(before)
    for start, length in ((0, first), (first + count, 160 - first - count)):
        if length:
            assert payload(taker, table, start, length) == payload(rest, table, start, length)
    assert torch.equal(taker.storage[10], before[10])


def test_a_read_only_payload_can_be_unpacked() -> None:
    sender, taker = random_cache(CPU, seed=1), random_cache(CPU, seed=2)
    packed = bytes(payload(sender, TABLE, 0, 40))
    taker.unpack(TABLE, 0, 40, memoryview(packed))
    assert payload(taker, TABLE, 0, 40) == packed


@pytest.mark.parametrize(("first", "count", "size"), [(0, 4, 3), (0, 0, 0), (40, 9, 9)])
def test_what_does_not_fit_is_refused(first: int, count: int, size: int) -> None:
    cache = random_cache(CPU, seed=1)
    buffer = memoryview(bytearray(size * LAYOUT.bytes_per_position))
    before = cache.storage.clone()
    with pytest.raises(Internal):
        cache.pack(TABLE, first, count, buffer)
    with pytest.raises(Internal):
        cache.unpack(TABLE, first, count, buffer)
    assert torch.equal(cache.storage, before)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_written_rows_lie_where_their_places_say(device: str) -> None:
    cache = BlockCache(LAYOUT, 4, 16, torch.device(device))
    places = torch.tensor([5, 63, 16], dtype=torch.int32, device=device)
    keys = torch.randn(3, 3, 24, device=device)
    values = torch.randn(3, 3, 16, device=device)
    cache.write(1, places, keys, values)
    for row, (block, offset) in enumerate(((0, 5), (3, 15), (1, 0))):
        assert torch.equal(cache.keys[block, 1, :, offset], keys[:, row])
        assert torch.equal(cache.values[block, 1, :, offset], values[:, row])
    assert int((cache.storage != 0).sum()) == 3 * 3 * (24 + 16)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_whole_blocks_are_copied_and_swapped(device: str) -> None:
    cache = random_cache(torch.device(device), seed=1)
    before = cache.storage.clone()
    cache.copy(BlockCopy(2, 5, 3))
    assert torch.equal(cache.storage[5], before[2])
    out = torch.empty(3, cache.block_bytes, dtype=torch.uint8)
    cache.blocks_out(1, 3, out)
    assert torch.equal(out.view(torch.float32), before[1:4].cpu())
    cache.blocks_in(6, 3, out)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(cache.storage[6:9], before[1:4])
    untouched = [0, 1, 2, 3, 4, 9, 10]
    assert torch.equal(cache.storage[untouched], before[untouched])
