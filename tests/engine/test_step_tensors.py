"""Tensors of steps: each row, table and tile where a plan says it is, at addresses that stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import PENDING, Chunk, SampleRow, StepPlan
from batonlm.engine.attention.triton.steps import DecodeBuffers, StepBuilder, StepTensors

CPU = torch.device("cpu")
TRASH = 40
GREEDY = SamplingParams(temperature=0.0)


def row(sequence: int) -> tuple[SampleRow, ...]:
    return (SampleRow(sequence, 0, 0, GREEDY),)


def expand(extents: Extents) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    chunks = []
    for i in range(draw(st.integers(1, 6))):
        count = draw(st.sampled_from((1, 1, 2, 17, 40)))
        first = draw(st.integers(0, 60))
        blocks = draw(st.permutations(range(TRASH)))[: (first + count + 15) // 16 + 1]
        extents = tuple((block, 1) for block in blocks)
        tokens = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        chunks.append(Chunk(i, tokens, first, extents, row(i) if draw(st.booleans()) else ()))
    return StepPlan(0, tuple(chunks))


def table_of(tensors: StepTensors, chunk: int) -> list[int]:
    start, end = int(tensors.table_starts[chunk]), int(tensors.ends[chunk])
    return tensors.tables[start : start + -(-end // 16)].tolist()


@pytest.mark.deep
@given(plan=plans(), tile=st.sampled_from((1, 5, 16)))
@settings(max_examples=100)
def test_every_row_and_tile_is_its_chunks_own(plan: StepPlan, tile: int) -> None:
    builder = StepBuilder(16, tile, CPU)
    for _ in range(2):
        tensors = builder.build(plan)
    order = sorted(plan.chunks, key=lambda chunk: len(chunk.token_ids) > 1)
    assert tensors.lone == sum(len(chunk.token_ids) == 1 for chunk in plan.chunks)
    assert tensors.token_ids[0].tolist() == [t for c in plan.chunks for t in c.token_ids]
    first_rows, sampled, rows = {}, [], 0
    for chunk in plan.chunks:
        first_rows[chunk.sequence_id] = rows
        rows += len(chunk.token_ids)
        sampled += [rows - 1] if chunk.samples else []
    assert tensors.sampled.tolist() == sampled
    tiles = []
    for at, chunk in enumerate(order):
        first = first_rows[chunk.sequence_id]
        own = slice(first, first + len(chunk.token_ids))
        positions = range(chunk.first_position, chunk.end_position)
        blocks = expand(chunk.extents)
        assert int(tensors.first_rows[at]) == first
        assert int(tensors.first_positions[at]) == chunk.first_position
        assert int(tensors.ends[at]) == chunk.end_position
        assert table_of(tensors, at) == blocks[: -(-chunk.end_position // 16)]
        assert tensors.positions[0, own].tolist() == list(positions)
        assert tensors.places[own].tolist() == [blocks[p // 16] * 16 + p % 16 for p in positions]
        if len(chunk.token_ids) > 1:
            tiles += [(at, number) for number in {p // tile for p in positions}]
    assert sorted(map(tuple, tensors.tiles.tolist())) == sorted(tiles)


@given(plan=plans())
@settings(max_examples=30)
def test_every_tensor_begins_where_triton_expects_it(plan: StepPlan) -> None:
    tensors = StepBuilder(16, 4, CPU).build(plan)
    base = tensors.token_ids.data_ptr()
    names = [n for n in StepTensors.__slots__ if n != "lone" and getattr(tensors, n).numel()]
    assert all((getattr(tensors, name).data_ptr() - base) % 16 == 0 for name in names)


def test_a_table_that_grew_is_expanded_anew() -> None:
    builder = StepBuilder(16, 4, CPU)
    builder.build(StepPlan(0, (Chunk(1, [5], 15, ((3, 1),)),)))
    tensors = builder.build(StepPlan(1, (Chunk(1, [5], 16, ((3, 1), (9, 1))),)))
    assert table_of(tensors, 0) == [3, 9]
    assert tensors.places.tolist() == [9 * 16]


def decode_plan(ends: list[int]) -> StepPlan:
    return StepPlan(
        0,
        tuple(
            Chunk(i, [PENDING if i == 1 else i + 10], end - 1, ((4 * i, 4),), row(i))
            for i, end in enumerate(ends)
        ),
    )


def test_decode_buffers_hold_a_plan_and_padding_at_the_same_addresses() -> None:
    buffers = DecodeBuffers(16, TRASH, 4, 4, CPU)
    recorded = buffers.tensors(4)
    for ends in ([1, 17, 64], [64, 18, 2], [33], []):
        tensors = buffers.fill(decode_plan(ends), 4)
        padding = 4 - len(ends)
        for name in StepTensors.__slots__:
            if name != "lone":
                assert getattr(tensors, name).data_ptr() == getattr(recorded, name).data_ptr()
                assert torch.equal(getattr(tensors, name), getattr(recorded, name))
        assert tensors.lone == 4
        assert tensors.token_ids[0].tolist() == [10, PENDING, 12][: len(ends)] + [0] * padding
        assert tensors.positions[0].tolist() == [end - 1 for end in ends] + [0] * padding
        assert tensors.ends.tolist() == ends + [1] * padding
        assert tensors.sampled.tolist() == tensors.first_rows.tolist() == [0, 1, 2, 3]
        places = [64 * i + end - 1 for i, end in enumerate(ends)] + [TRASH * 16] * padding
        assert tensors.places.tolist() == places
        for i, end in enumerate(ends):
            assert table_of(tensors, i) == [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3][: -(-end // 16)]
        assert all(table_of(tensors, i) == [TRASH] for i in range(len(ends), 4))


def test_decode_buffers_take_no_more_than_they_hold() -> None:
    buffers = DecodeBuffers(16, TRASH, 2, 2, CPU)
    for ends, rows in (([1, 1, 1], 2), ([1, 1, 1], 3), ([33], 1)):
        with pytest.raises(Internal):
            buffers.fill(decode_plan(ends), rows)
