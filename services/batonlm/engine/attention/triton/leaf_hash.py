"""`batonlm.core.handover.leaf_hash` on a GPU: one kernel, a program a leaf.

A program reads its leaf as ROWS rows of LANES words, so that a word's exponent is LANES times its
row plus its lane. Each lane sums its words times the rows' powers, as three sums of halves of 32
bits, and is multiplied by its own power once, at the end. 2^61 counts as 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from batonlm.core.handover.leaf_hash import LEAF_BYTES, WORD_BYTES, Points, powers
from batonlm.engine.attention.triton.jit import jit, jit_of_any
from batonlm.engine.device import upload

_LANES = 1024
_ROWS = LEAF_BYTES // WORD_BYTES // _LANES
_WARPS = 8
_P = tl.constexpr((1 << 61) - 1)
_LOW = tl.constexpr((1 << 32) - 1)


class Tables(NamedTuple):
    """Powers of both points, int64."""

    rows: torch.Tensor
    """[2, _ROWS]"""
    lanes: torch.Tensor
    """[2, _LANES]"""


def tables(points: Points, device: torch.device) -> Tables:
    rows = [powers(point, _ROWS, _LANES) for point in points]
    lanes = [powers(point, _LANES) for point in points]
    return Tables(upload(rows, torch.int64, device), upload(lanes, torch.int64, device))


def leaf_hashes(payload: torch.Tensor, given: Tables, found: torch.Tensor) -> None:
    """Writes the hashes of all leaves to found, uint8 [leaves, HASH_BYTES].

    payload: uint8 [bytes], whole words, aligned to 16 bytes.
    """
    words = payload.view(torch.int32)
    _leaves[(len(found),)](
        words, len(words), given.rows, given.lanes, found.view(torch.int64),
        LANES=_LANES, ROWS=_ROWS, num_warps=_WARPS,
    )  # fmt: skip


@jit_of_any("count")
def _leaves(
    words: tl.tensor,
    count: tl.tensor,
    row_powers: tl.tensor,
    lane_powers: tl.tensor,
    found: tl.tensor,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program i: leaf i of the payload's words, count of them."""
    leaf = tl.program_id(0)
    lane = tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.uint64)
    low, middle, high = zero, zero, zero
    other_low, other_middle, other_high = zero, zero, zero
    for row in range(ROWS):
        spot = leaf * (ROWS * LANES) + row * LANES + lane
        word = tl.load(words + spot, mask=spot < count, other=0)
        word = word.to(tl.uint32, bitcast=True).to(tl.uint64)
        power = tl.load(row_powers + row).to(tl.uint64)
        other_power = tl.load(row_powers + ROWS + row).to(tl.uint64)
        low, middle, high = _added(low, middle, high, word, power)
        other_low, other_middle, other_high = _added(
            other_low, other_middle, other_high, word, other_power
        )
    tl.store(found + leaf * 2, _joined(low, middle, high, lane_powers + lane))
    tl.store(
        found + leaf * 2 + 1,
        _joined(other_low, other_middle, other_high, lane_powers + LANES + lane),
    )


@jit
def _added(
    low: tl.tensor, middle: tl.tensor, high: tl.tensor, word: tl.tensor, power: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The sums of what counts 1, 2^32 and 2^64 in a lane's products. word: below 2^32."""
    lower, upper = word * (power & _LOW), word * (power >> 32)
    return low + (lower & _LOW), middle + (lower >> 32) + (upper & _LOW), high + (upper >> 32)


@jit
def _joined(
    low: tl.tensor, middle: tl.tensor, high: tl.tensor, power_spots: tl.tensor
) -> tl.tensor:
    """The leaf's hash, int64, from its lanes' sums and powers. low, middle and high: below 2^40."""
    lane = _folded(low + _times_2_32(middle) + high * 8)
    power = tl.load(power_spots).to(tl.uint64)
    # As in school: both below 2^62, so that what is across is below 2^63.
    lane_low, lane_high = lane & _LOW, lane >> 32
    power_low, power_high = power & _LOW, power >> 32
    across = _times_2_32(lane_high * power_low + lane_low * power_high)
    product = _folded(lane_high * power_high * 8 + across + _folded(lane_low * power_low))
    total = tl.sum(product & _LOW, 0) + _times_2_32(tl.sum(product >> 32, 0))
    total = _folded(_folded(total))
    return tl.where(total >= _P, total - _P, total).to(tl.int64)


@jit
def _times_2_32(number: tl.tensor) -> tl.tensor:
    """Of a number below 2^63, below 2^61 + 2^34."""
    return (number >> 29) + ((number & 0x1FFFFFFF) << 32)


@jit
def _folded(number: tl.tensor) -> tl.tensor:
    """The same modulo 2^61 - 1, below 2^61 + 8."""
    return (number & _P) + (number >> 61)
