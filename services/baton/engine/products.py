"""Matrix products whose rows do not depend on how many rows there are; knows no model.

A BLAS picks its algorithm by the number of rows, and another algorithm sums in another order. So a
product is only ever computed with numbers of rows that were *proven* at load, on this machine and
for this shape, to give bit-equal rows; anything else is cut and padded to those. On the CPUs
measured most sizes pass, so that padding is small; where none passes, exactness is given up openly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]
"""[rows, inputs] -> [rows, outputs] with weights bound."""

BASE = 16
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class NotExact(Exception):
    """A product's rows depend on their neighbours whatever we do. Its text says which one."""


def prove(
    product: Product, inputs: int, dtype: torch.dtype, device: torch.device
) -> frozenset[int]:
    """The numbers of rows that give the same bits as tiles of 16 do.

    Random rows: two summation orders agree on all of hundreds of rows by chance never. Raises
    NotExact when even tiles of 16 depend on where in the tile a row stands.
    """
    generator = torch.Generator(device="cpu").manual_seed(7)
    largest = _SIZES[-1]
    rows = torch.randn(largest + BASE, inputs, generator=generator).to(dtype).to(device)
    tiles = [product(rows[start : start + BASE]) for start in range(0, len(rows), BASE)]
    expected = torch.cat(tiles)
    shifted = BASE // 2 - 3
    if not torch.equal(product(rows[shifted : shifted + BASE]), expected[shifted : shifted + BASE]):
        raise NotExact(f"rows of a product with {inputs} inputs depend on their place")
    proven = {BASE}
    for size in _SIZES:
        starts = (0, shifted, largest - size) if size < 64 else (shifted,)
        if all(torch.equal(product(rows[s : s + size]), expected[s : s + size]) for s in starts):
            proven.add(size)
    return frozenset(proven)


def tiled(product: Product, rows: torch.Tensor, sizes: frozenset[int]) -> torch.Tensor:
    """The product of [n, inputs] rows, computed in proven sizes only."""
    count = rows.shape[0]
    if count in sizes:
        return product(rows)
    if count == 0:
        return product(rows.new_zeros(BASE, rows.shape[1]))[:0]
    largest = max(sizes)
    if count > largest:
        starts = range(0, count, largest)
        return torch.cat([tiled(product, rows[s : s + largest], sizes) for s in starts])
    size = min(size for size in sizes if size > count)
    return product(torch.nn.functional.pad(rows, (0, 0, 0, size - count)))[:count]
