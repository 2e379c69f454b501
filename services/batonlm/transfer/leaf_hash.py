"""`batonlm.core.handover.leaf_hash` on a CPU: products of float64 matrices, which are exact.

A leaf is read as 64 rows of 256 words, so that a word's exponent is 256 times its row plus its
column. Each word is two numbers of 16 bits, and each power of a point, times 2^16 for the higher
one, three limbs of 21, 21 and 19 bits. The sums of 512 products of 16 and 21 bits that a matrix
product makes are below 2^46, where float64 counts every whole number. What is left is arithmetic
modulo 2^61 - 1 on one number a row, in uint64: 2^61 counts as 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from batonlm.core.handover.leaf_hash import (
    LEAF_BYTES,
    PRIME,
    WORD_BYTES,
    Points,
    num_leaves,
    powers,
)

_ROWS = 64
_COLUMNS = LEAF_BYTES // WORD_BYTES // _ROWS
_LIMBS = ((0, 21), (21, 21), (42, 19))
"""Each limb's lowest bit and its number of bits."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

_P = np.uint64(PRIME)


def leaf_hashes(payload: memoryview, points: Points) -> bytes:
    """HASH_BYTES for each leaf of a payload, in order. Releases the GIL for most of its time."""
    columns, rows = _tables(points)
    given = np.frombuffer(payload, np.uint8)
    whole, sums = len(given) // LEAF_BYTES, np.empty((num_leaves(len(given)), _ROWS, 6))
    leaf = np.empty((_ROWS, 2 * _COLUMNS))
    for i in range(len(sums)):
        part = given[i * LEAF_BYTES : (i + 1) * LEAF_BYTES]
        if i == whole:
            part = np.concatenate([part, np.zeros(LEAF_BYTES - len(part), np.uint8)])
        np.copyto(leaf, part.view("<u2").reshape(leaf.shape))
        # One leaf at a time: it stays in the cache, and so small a product starts no threads.
        np.matmul(leaf, columns, out=sums[i])
    limbs = sums.astype(np.uint64).reshape(len(sums), _ROWS, 2, 3)
    return _total(_product(_joined(limbs), rows)).astype("<u8").tobytes()


@lru_cache(maxsize=64)
def _tables(points: Points) -> tuple[Floats, Words]:
    """Limbs of the columns' powers, [2 * _COLUMNS, 2 points * 3 limbs], and the rows' powers,
    [_ROWS, 2 points]."""
    columns = np.array([powers(point, _COLUMNS) for point in points], np.uint64).T
    rows = np.array([powers(point, _ROWS, _COLUMNS) for point in points], np.uint64).T
    halves = np.stack([columns, _reduced(_times(columns, 16))], 1)
    limbs = [halves >> np.uint64(low) & np.uint64((1 << bits) - 1) for low, bits in _LIMBS]
    return np.stack(limbs, -1).reshape(2 * _COLUMNS, 6).astype(np.float64), rows


def _joined(limbs: Words) -> Words:
    """The numbers, below 2^61 + 4, whose three limbs are the last dimension, each below 2^46."""
    low, middle, high = limbs[..., 0], limbs[..., 1], limbs[..., 2]
    return _folded(low + _times(middle, 21) + _times(high, 42))


def _product(one: Words, other: Words) -> Words:
    """Modulo PRIME, below 2^61 + 4. one: below 2^62; other: below 2^61."""
    mask, half = np.uint64((1 << 32) - 1), np.uint64(32)
    low, high = one & mask, one >> half
    other_low, other_high = other & mask, other >> half
    # 2^64 counts as 8. The sum of the four is below 2^63.
    across = _times(high * other_low + low * other_high, 32)
    return _folded(((high * other_high) << np.uint64(3)) + across + _folded(low * other_low))


def _total(numbers: Words) -> Words:
    """The sum over the rows, the dimension before the last, modulo PRIME. numbers: below 2^62."""
    mask, half = np.uint64((1 << 32) - 1), np.uint64(32)
    low, high = (numbers & mask).sum(-2), (numbers >> half).sum(-2)
    return _reduced(low + _times(high, 32))


def _times(numbers: Words, bits: int) -> Words:
    """numbers, below 2^63, times 2^bits modulo PRIME, below 2^61 + 2^(bits + 2)."""
    room = np.uint64(61 - bits)
    return (numbers >> room) + (
        (numbers & (np.uint64(1) << room) - np.uint64(1)) << np.uint64(bits)
    )


def _reduced(numbers: Words) -> Words:
    """The same modulo PRIME."""
    found = _folded(_folded(numbers))
    return np.where(found >= _P, found - _P, found)


def _folded(numbers: Words) -> Words:
    """The same modulo PRIME, below 2^61 + 8."""
    return (numbers & _P) + (numbers >> np.uint64(61))
