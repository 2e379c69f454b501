"""Tiles, masks and the ways of rows between them, against the simplest thing that is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.scheduler.plan import Chunk
from batonlm.engine.attention.tiles import (
    LOOSE,
    MaskBank,
    Tile,
    cut_tiles,
    find_routes,
)

CPU = torch.device("cpu")
WHERE = ((0, 40),)


def cut(first: int, count: int, mode: str, first_row: int = 3) -> list[Tile]:
    chunk = Chunk(0, [7] * count, first, WHERE)
    return cut_tiles(chunk, first_row, exact=mode != "loose", lone=mode == "lone")


modes = st.sampled_from(["loose", "lone", "whole"])


@given(first=st.integers(0, 300), count=st.integers(1, 200), mode=modes)
@settings(max_examples=200)
def test_every_row_is_in_one_tile_at_its_own_position(first: int, count: int, mode: str) -> None:
    tiles = cut(first, count, mode)
    rows = [row for tile in tiles for row in tile.rows() if row >= 0]
    assert rows == list(range(3, 3 + count))
    for tile in tiles:
        assert tile.first_position - first == tile.first_row - 3
        assert tile.rows()[tile.lead] == tile.first_row
        assert tile.start <= tile.first_position
        assert tile.first_position + tile.count <= tile.end
        assert tile.lone == (tile.width == 1)
        if mode == "loose":
            assert tile.count == tile.end - tile.start <= LOOSE
        else:
            assert tile.start % 16 == 0
            assert tile.end == tile.start + 16
            assert tile.lone == (mode == "lone" and tile.count == 1)


@given(position=st.integers(0, 300), other=st.integers(0, 20), window=st.integers(1, 90))
@settings(max_examples=200)
def test_what_an_exact_tile_reads_depends_on_its_positions_alone(
    position: int, other: int, window: int
) -> None:
    """However the chunk was cut that brought the row."""
    (alone,) = cut(position, 1, "lone")
    chunk = cut(max(0, position - other), other + 1, "whole")
    (within,) = [tile for tile in chunk if tile.start <= position < tile.end]
    assert (alone.first_key(window), alone.end) == (within.first_key(window), within.end)
    assert alone.first_key(window) <= max(0, position - window + 1)


@given(
    first=st.integers(0, 100),
    count=st.integers(1, 80),
    window=st.none() | st.integers(1, 90),
    group=st.integers(1, 3),
    mode=modes,
)
@settings(max_examples=150)
def test_masks_show_each_position_its_past(
    first: int, count: int, window: int | None, group: int, mode: str
) -> None:
    bank = MaskBank(torch.float32, CPU, LOOSE if mode == "loose" else 16)
    for tile in cut(first, count, mode):
        mask = bank.take(tile, window, group)[0, 0]
        keys = torch.arange(tile.first_key(window), tile.end)
        assert mask.shape == (1 if tile.lone else tile.width * group, len(keys))
        for row, seen in enumerate(mask == 0):
            position = tile.first_position - tile.lead + row // group
            expected = keys <= position
            if window is not None:
                expected &= keys > position - window
            assert torch.equal(seen, expected)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("lone_rows", [2, 5])
@pytest.mark.parametrize(
    "chunks",
    [[(4, 1)], [(4, 1), (15, 1)], [(0, 16)], [(5, 40)], [(7, 1), (3, 30), (16, 16), (9, 1)]],
)
def test_rows_find_their_way_into_tiles_and_back(
    chunks: list[tuple[int, int]], lone_rows: int, padding: int
) -> None:
    heads, kv_heads, size = 6, 3, 4
    for mode in ("lone", "whole", "loose"):
        tiles: list[Tile] = []
        total = 0
        for first, count in chunks:
            tiles += cut(first, count, mode, total)
            total += count
        routes = find_routes(tiles, heads, kv_heads, lone_rows, CPU, padding)
        rows = torch.arange(total * heads * size).view(total, heads, size)
        parts = routes.scatter(rows.view(total * heads, size))
        for tile, part in zip(tiles, parts, strict=True):
            wanted = lone_rows if tile.lone else tile.width * 2
            assert part.shape == (1, kv_heads, wanted, size)
            real = part[0, :, tile.lead * 2 : (tile.lead + tile.count) * 2]
            own = rows[tile.first_row : tile.first_row + tile.count].view(-1, kv_heads, 2, size)
            assert torch.equal(real.view(kv_heads, tile.count, 2, size), own.transpose(0, 1))
        back = routes.gather(parts).view(total + padding, heads, size)
        assert torch.equal(back[:total], rows)


def test_steady_decode_moves_no_rows() -> None:
    tiles = [tile for row in range(5) for tile in cut(row * 7, 1, "lone", row)]
    routes = find_routes(tiles, 6, 3, 2, CPU)
    assert routes.sources is None
    assert routes.targets is None
