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
        drafts = draw(st.sampled_from((0, count - 1)))
        samples = row(i) * (drafts + 1) if draw(st.booleans()) else ()
        chunks.append(Chunk(i, tokens, first, extents, samples, num_drafts=drafts))
    return StepPlan(0, tuple(chunks))


def table_of(tensors: StepTensors, chunk: int) -> list[int]:
    start, end = int(tensors.table_starts[chunk]), int(tensors.ends[chunk])
    return tensors.tables[start : start + -(-end // 16)].tolist()


@pytest.mark.deep
@given(plan=plans(), tile=st.sampled_from((1, 5, 16)))
@settings(max_examples=100)
def test_every_row_and_tile_is_its_spans_own(plan: StepPlan, tile: int) -> None:
    builder = StepBuilder(16, tile, CPU)
    for _ in range(2):
        tensors = builder.build(plan)
    assert tensors.token_ids[0].tolist() == [t for c in plan.chunks for t in c.token_ids]
    sampled: list[int] = []
    lone, whole, rows = [], [], 0
    for chunk in plan.chunks:
        positions = range(chunk.first_position, chunk.end_position)
        if len(positions) == 1 or chunk.num_drafts:
            lone += [(chunk, rows + i, range(p, p + 1)) for i, p in enumerate(positions)]
        else:
            whole.append((chunk, rows, positions))
        rows += len(positions)
        sampled += range(rows - 1 - chunk.num_drafts, rows) if chunk.samples else ()
    assert tensors.sampled.tolist() == sampled
    assert tensors.lone == len(lone)
    tiles = []
    for at, (chunk, first, positions) in enumerate(lone + whole):
        own = slice(first, first + len(positions))
        blocks = expand(chunk.extents)
        assert int(tensors.first_rows[at]) == first
        assert int(tensors.first_positions[at]) == positions.start
        assert int(tensors.ends[at]) == positions.stop
        assert table_of(tensors, at) == blocks[: -(-positions.stop // 16)]
        assert tensors.positions[0, own].tolist() == list(positions)
        assert tensors.places[own].tolist() == [blocks[p // 16] * 16 + p % 16 for p in positions]
        if at >= len(lone):
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


def test_decode_buffers_have_a_row_for_each_draft() -> None:
    buffers = DecodeBuffers(16, TRASH, 8, 4, CPU)
    chunks = (
        Chunk(0, [10, 20, 30], 15, ((8, 4),), row(0) * 3, num_drafts=2),
        Chunk(1, [PENDING], 40, ((0, 4),), row(1)),
        Chunk(2, [12, 22], 0, ((20, 1),), row(2) * 2, num_drafts=1),
    )
    tensors = buffers.fill(StepPlan(0, chunks), 8)
    assert tensors.token_ids[0].tolist() == [10, 20, 30, PENDING, 12, 22, 0, 0]
    positions = [15, 16, 17, 40, 0, 1, 0, 0]
    assert tensors.positions[0].tolist() == tensors.first_positions.tolist() == positions
    assert tensors.ends.tolist() == [position + 1 for position in positions]
    places = [8 * 16 + 15, 9 * 16, 9 * 16 + 1, 2 * 16 + 8, 20 * 16, 20 * 16 + 1]
    assert tensors.places.tolist() == [*places, TRASH * 16, TRASH * 16]
    assert tensors.sampled.tolist() == tensors.first_rows.tolist() == list(range(8))
    assert tensors.lone == 8
    tables = [table_of(tensors, i) for i in range(8)]
    assert tables == [[8], [8, 9], [8, 9], [0, 1, 2], [20], [20], [TRASH], [TRASH]]


def test_decode_buffers_take_no_more_than_they_hold() -> None:
    buffers = DecodeBuffers(16, TRASH, 2, 2, CPU)
    for ends, rows in (([1, 1, 1], 2), ([1, 1, 1], 3), ([33], 1)):
        with pytest.raises(Internal):
            buffers.fill(decode_plan(ends), rows)
    drafted = Chunk(0, [10, 20, 30], 0, ((8, 2),), row(0) * 3, num_drafts=2)
    with pytest.raises(Internal):
        buffers.fill(StepPlan(0, (drafted,)), 2)
