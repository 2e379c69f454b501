"""Places, tiles and payloads: arithmetic of blocks against the simplest thing that is right."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.tiled import build_inputs
from batonlm.engine.kv.cache import KvCache
from batonlm.engine.kv.extents import spans

CPU = torch.device("cpu")


@st.composite
def tables(draw: st.DrawFn) -> Extents:
    """Extents over a pool of 40 blocks, no block twice."""
    blocks = draw(st.permutations(range(40)))[: draw(st.integers(1, 12))]
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return tuple(found)


def place_of(table: Extents, position: int, block_size: int = 16) -> int:
    blocks = [block for first, count in table for block in range(first, first + count)]
    return blocks[position // block_size] * block_size + position % block_size


@given(table=tables(), data=st.data())
@settings(max_examples=100)
def test_spans_are_the_places_of_positions(table: Extents, data: st.DataObject) -> None:
    covered = 16 * sum(count for _, count in table)
    first = data.draw(st.integers(0, covered - 1))
    count = data.draw(st.integers(1, covered - first))
    runs = list(spans(table, first, count, 16))
    places = [place for start, length in runs for place in range(start, start + length)]
    assert places == [place_of(table, position) for position in range(first, first + count)]
    assert all(sum(a) != b[0] for a, b in pairwise(runs))


@given(table=tables(), data=st.data())
@settings(max_examples=100)
def test_inputs_are_the_rows_of_all_chunks(table: Extents, data: st.DataObject) -> None:
    covered = 16 * sum(count for _, count in table)
    first = data.draw(st.integers(0, covered - 1))
    count = data.draw(st.integers(1, covered - first))
    plan = StepPlan(0, (Chunk(0, [5], 15, ((50, 1),)), Chunk(1, [7] * count, first, table)))
    inputs = build_inputs(plan, 16, CPU)
    assert inputs.token_ids[0].tolist() == [5, *[7] * count]
    assert inputs.positions[0].tolist() == [15, *range(first, first + count)]
    assert inputs.places[1:].tolist() == [place_of(table, p) for p in range(first, first + count)]
    end = first + count
    fresh = end % 16 != 0 and end // 16 * 16 >= first
    ahead = [place_of(table, p) for p in range(end, -(-end // 16) * 16)] if fresh else []
    assert inputs.stale.tolist() == ahead


def layout(key_size: int, value_size: int, dtype: str = "float32") -> KvLayout:
    return KvLayout("d", dtype, 2, 3, key_size, value_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("key_size", "value_size"), [(8, 8), (6, 4), (4, 6), (6, 0)])
def test_the_payload_is_layer_kind_position_head_element(
    key_size: int, value_size: int, dtype: str
) -> None:
    shape = layout(key_size, value_size, dtype)
    cache = KvCache(shape, 10, 16, CPU, even=key_size > value_size)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    table = ((7, 1), (2, 2))
    payload = bytearray(30 * shape.bytes_per_position)
    cache.pack(table, 5, 30, memoryview(payload))
    places = [place_of(table, position) for position in range(5, 35)]
    expected = b""
    for layer in range(2):
        for memory, size in ((cache.keys, key_size), (cache.values, value_size)):
            found = memory[layer][:, places, :size].transpose(0, 1).contiguous()
            expected += found.view(torch.uint8).numpy().tobytes()
    assert bytes(payload) == expected


def test_unpacking_clears_what_lies_ahead_in_the_tile() -> None:
    shape = layout(4, 4)
    cache = KvCache(shape, 4, 16, CPU)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    payload = struct.pack("<f", 1.0) * (20 * shape.bytes_per_position // 4)
    cache.unpack(((1, 2),), 0, 20, memoryview(payload))
    for memory in (cache.keys, cache.values):
        assert bool((memory[:, :, 16:36] == 1).all())
        assert bool((memory[:, :, 36:48] == 0).all())
        assert bool(memory[:, :, 48:].isnan().all())


def test_copying_clears_what_lies_ahead_in_the_tile() -> None:
    cache = KvCache(layout(4, 4), 4, 32, CPU)
    cache.keys.fill_(torch.inf)
    cache.keys[:, :, :5] = 2
    cache.copy(BlockCopy(0, 3, 5))
    assert bool((cache.keys[:, :, 96:101] == 2).all())
    assert bool((cache.keys[:, :, 101:112] == 0).all())
