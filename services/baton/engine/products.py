"""Matrix products whose rows do not depend on how many rows there are.

A BLAS picks its algorithm by the number of rows, and another algorithm sums in another order. So a
product is only ever computed with numbers of rows that were *proven* at load, on this machine and
for this shape, to give bit-equal rows; anything else is cut and padded to those. On the CPUs
measured most sizes pass, so that padding is small; where none passes, exactness is given up openly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., inputs] -> [..., outputs] with weights bound."""

BASE = 16
MOST = 512
"""The most rows that are computed at once in exact mode."""

_SIZES = (
    *range(1, 8),
    *range(8, 32, 4),
    *range(32, 64, 8),
    *range(64, 128, 16),
    *range(128, MOST + 1, 32),
)
# What a call costs beside its rows, in rows: reading the weights. Fits float32 on the CPUs measured
# to a factor of two, and only decides between padding and cutting.
_CALL = 16
_OUTPUTS_IN_HALF = 1 << 16


class NotExact(Exception):
    """A product's rows depend on their neighbours whatever we do. Its text says which one."""


def random_rows(
    inputs: int, dtype: torch.dtype, device: torch.device, most: int = MOST
) -> torch.Tensor:
    """The same [most + 16, inputs] random rows every time."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    return torch.randn(most + BASE, inputs, generator=generator).to(dtype).to(device)


def in_tiles(product: Product, rows: torch.Tensor) -> torch.Tensor:
    """The bits that all other row counts are held against: rows in tiles of 16."""
    return torch.cat([product(rows[s : s + BASE]) for s in range(0, len(rows), BASE)])


def prove(product: Product, rows: torch.Tensor, expected: torch.Tensor) -> frozenset[int]:
    """The numbers of rows with which a product gives the expected bits, 16 always among them.

    rows: of `random_rows`; two summation orders agree on all outputs that are looked at by chance
    never. expected: [rows, outputs]. Raises NotExact when even tiles of 16 differ, or depend on
    where in the tile a row stands.
    """
    largest = len(rows) - BASE
    proven = set()
    for size in _SIZES:
        if size > largest:
            break
        starts = _starts(size, largest, expected.shape[1], expected.dtype)
        if all(torch.equal(product(rows[s : s + size]), expected[s : s + size]) for s in starts):
            proven.add(size)
    if BASE not in proven:
        raise NotExact(f"rows of a product with {rows.shape[1]} inputs depend on their place")
    return frozenset(proven)


def _starts(size: int, largest: int, outputs: int, dtype: torch.dtype) -> list[int]:
    """Where to cut `size` rows out of `largest` + 16, the first time across tiles of 16.

    Rounding to half precision hides a different order of summing in all but a few of ten thousand
    outputs, so there as many are looked at as it takes; in float32 it shows nearly everywhere.
    """
    wanted = _OUTPUTS_IN_HALF if dtype.itemsize < 4 else 3 * outputs
    count = -(-wanted // (size * outputs))
    span = largest + BASE - size
    return sorted({(BASE // 2 - 3 + i * span // count) % span for i in range(count)})


def tiled(product: Product, rows: torch.Tensor, sizes: frozenset[int]) -> torch.Tensor:
    """The product of [n, inputs] rows, computed in proven sizes only."""
    count = rows.shape[0]
    pieces = []
    start = 0
    for size in cuts(count, sizes):
        piece = rows[start : start + size]
        if len(piece) < size:
            piece = F.pad(piece, (0, 0, 0, size - len(piece)))
        pieces.append(product(piece))
        start += size
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count]


@lru_cache(maxsize=4096)
def cuts(count: int, sizes: frozenset[int]) -> tuple[int, ...]:
    """The sizes to compute `count` rows in, one behind the other; the last may be padded."""
    whole = max((size for size in sizes if size <= count), default=0)
    padded = min((size for size in sizes if size >= count), default=0)
    if not whole or whole == count:
        return (padded,)
    cut = (whole, *cuts(count - whole, sizes))
    if padded and padded + _CALL <= sum(cut) + _CALL * len(cut):
        return (padded,)
    return cut
