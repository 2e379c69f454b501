"""Whole attention steps over paged memory against softmax over each sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.interface import LayerArguments
from batonlm.engine.attention.kernels import Kernel, flash_cpu, reference
from batonlm.engine.attention.tiled import KeyReader, TiledBackend
from batonlm.engine.attention.tiles import cut_tiles
from batonlm.engine.kv.cache import KvCache

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, VALUE = 6, 3, 8, 6
LENGTH = 200
BLOCKS = 13
SEQUENCES = 3


@dataclass
class Told:
    """Query, key and value of every position, [heads, LENGTH, size], and where KV is kept."""

    extents: Extents
    done: int = 0
    query: torch.Tensor = field(default_factory=lambda: torch.randn(HEADS, LENGTH, SIZE))
    key: torch.Tensor = field(default_factory=lambda: torch.randn(KV_HEADS, LENGTH, SIZE))
    value: torch.Tensor = field(default_factory=lambda: torch.randn(KV_HEADS, LENGTH, VALUE))

    def expected(self, first: int, count: int, layer: LayerArguments) -> torch.Tensor:
        """[count, HEADS, VALUE]."""
        per_head = HEADS // KV_HEADS
        keys = self.key[:, : first + count].repeat_interleave(per_head, 0)
        values = self.value[:, : first + count].repeat_interleave(per_head, 0)
        scores = self.query[:, first : first + count] @ keys.transpose(1, 2) * layer.scale
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        back = torch.arange(first, first + count)[:, None] - torch.arange(first + count)
        hidden = (back < 0) | (back >= (layer.window or LENGTH))
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer.sinks is None:
            return (torch.softmax(scores, -1) @ values).transpose(0, 1)
        sinks = layer.sinks[:, None, None].expand(-1, count, 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        return (weights @ values).transpose(0, 1)


def run(
    attention: TiledBackend,
    sequences: Sequence[Told],
    counts: Sequence[int],
    layers: Sequence[LayerArguments],
) -> None:
    """One step in which every sequence advances by its count; compares all rows of all layers."""
    chunks, rows = [], []
    for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        count = min(count, LENGTH - sequence.done)
        if count:
            chunks.append(Chunk(i, [7] * count, sequence.done, sequence.extents))
            rows.append((sequence, sequence.done, count))
            sequence.done += count
    if not chunks:
        return
    context = attention.begin(StepPlan(0, tuple(chunks))).context
    assert context is not None

    def batch(name: str) -> torch.Tensor:
        return torch.cat([getattr(s, name)[:, f : f + n] for s, f, n in rows], 1)

    for layer in layers:
        output = context(layer, batch("query"), batch("key"), batch("value"))
        expected = torch.cat([s.expected(f, n, layer) for s, f, n in rows])
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def memory(kernel: Kernel) -> KvCache:
    layout = KvLayout("d", "float32", 2, KV_HEADS, SIZE, VALUE)
    cache = KvCache(layout, SEQUENCES * BLOCKS, 16, CPU, even=kernel is flash_cpu)
    # What former owners left behind must never be seen.
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


@st.composite
def tables(draw: st.DrawFn) -> list[Extents]:
    """Tables for all sequences: in whole, or torn into pieces anywhere."""
    blocks = list(range(SEQUENCES * BLOCKS))
    if draw(st.booleans()):
        blocks = list(draw(st.permutations(blocks)))
    own = [blocks[i * BLOCKS : (i + 1) * BLOCKS] for i in range(SEQUENCES)]
    return [tuple((block, 1) for block in table) for table in own]


@pytest.mark.deep
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kernel", [flash_cpu, reference])
@given(
    tables=tables(),
    steps=st.lists(
        st.lists(st.sampled_from([0, 1, 1, 5, 40]), min_size=3, max_size=3), min_size=1, max_size=7
    ),
    window=st.none() | st.integers(1, 50),
    sinks=st.booleans(),
    lone_rows=st.sampled_from([None, 2, 3]),
)
@settings(max_examples=25)
def test_steps_are_softmax_over_the_past(
    kernel: Kernel,
    exact: bool,
    tables: list[Extents],
    steps: list[list[int]],
    window: int | None,
    sinks: bool,
    lone_rows: int | None,
) -> None:
    torch.manual_seed(0)
    rows = lone_rows if exact else HEADS // KV_HEADS
    attention = TiledBackend(memory(kernel), kernel, exact=exact, lone_rows=rows)
    layers = [
        LayerArguments(0, 0.4, None, 30.0 if kernel is reference else None, None),
        LayerArguments(1, 0.3, window, None, torch.randn(HEADS) if sinks else None),
    ]
    sequences = [Told(table) for table in tables]
    for counts in steps:
        run(attention, sequences, counts, layers)


@pytest.mark.parametrize("window", [None, 900])
def test_keys_are_read_where_they_lie_when_that_pays(window: int | None) -> None:
    layout = KvLayout("d", "float32", 2, 1, 4, 4)
    cache = KvCache(layout, 200, 16, CPU)
    cache.keys.normal_()
    chunk = Chunk(0, [7], 1600, ((5, 60), (120, 60)))
    positions = [*range(80, 1040), *range(1920, 2880)]
    for exact in (True, False):
        (tile,) = cut_tiles(chunk, 0, exact=exact, lone=True)
        reader = KeyReader(cache, exact=exact)
        reading = reader.read(chunk, [tile], window, 1)
        (own,) = reading.tiles
        if exact or window is not None:
            assert reading.places is not None
            assert reading.places.tolist() == positions[tile.first_key(window) : tile.end]
            keys, _ = reader.gather(1, reading.places)
        else:
            assert [keys[0].shape[2] for keys, _ in own.runs] == [960, 641]
            keys = torch.cat([keys[1] for keys, _ in own.runs], 2)
        seen = positions[tile.first_key(window) : tile.end]
        assert torch.equal(keys[0, 0], cache.keys[1, 0, seen])
        assert (own.mask is None) == (not exact and window is None)


def test_views_are_kept_from_step_to_step_and_no_longer() -> None:
    layout = KvLayout("d", "float32", 2, 1, 4, 4)
    reader = KeyReader(KvCache(layout, 20, 16, CPU), exact=True)

    def read(position: int) -> object:
        reader.begin()
        chunk = Chunk(0, [7], position, ((5, 10),))
        (own,) = reader.read(chunk, cut_tiles(chunk, 0, exact=True, lone=True), None, 1).tiles
        return own.runs[0]

    first = read(40)
    assert read(41) is first
    assert read(50) is not first
    assert read(41) is not first
