"""Turns extents and a range of positions into runs of consecutive places in KV memory.

Knows only arithmetic: a place is block id x block size + offset in the block.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.core.kvcache.block_pool import Extents


def spans(
    extents: Extents, first_position: int, count: int, block_size: int
) -> Iterator[tuple[int, int]]:
    """Yields (first place, number of places), in position order, neighbours joined.

    The extents cover the range: see `check.check_extents`.
    """
    start, length = 0, 0
    position = 0
    end = first_position + count
    for block, blocks in extents:
        size = blocks * block_size
        low, high = max(first_position, position), min(end, position + size)
        if low < high:
            place = block * block_size + low - position
            if length and start + length == place:
                length += high - low
            else:
                if length:
                    yield start, length
                start, length = place, high - low
        position += size
        if position >= end:
            break
    if length:
        yield start, length
