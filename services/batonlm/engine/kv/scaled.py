"""KV in one byte a number: e4m3 or int8, with a scale for the keys of each position and head, and
for its values.

A row is the numbers that share a scale. Its scale depends on nothing else, so that a position is
kept as the same bits however its prompt is cut into chunks, and whatever a block holds beside it.

Scales are powers of two, in one byte, as the exponents of OCP's microscaling formats (E8M0, 2023):
the exponent plus 127, and 255 for a row with a number that is none, all of which is then NaN. So
scaling rounds nothing, every number is one of bfloat16, too, and a row that was made wide and
narrow again has the numbers that it had. Zeroed memory holds zeros.

Codes and their scales have the type in which torch holds the codes: uint8 are the bits of e4m3,
int8 are whole numbers.
"""

from __future__ import annotations

import torch

LARGEST = {torch.uint8: 448.0, torch.int8: 127.0}
"""The largest number under the scale 1, by the type of codes."""

_EXPONENT_BITS = 23
_MANTISSA = (1 << _EXPONENT_BITS) - 1
_LARGEST_BITS = {torch.uint8: 0x43E00000, torch.int8: 0x42FE0000}
"""LARGEST as float32."""
_INFINITY_BITS = 0x7F800000
_NO_NUMBER = 255


def narrowed(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., size] of any float type -> codes [.., size] and scales [.., 1], both of this dtype.

    The scale is the least under which the largest number of a row is not above LARGEST; numbers
    become the nearest that there are, of two as near the one whose last bit is 0. Rows of no
    numbers have no scale, [.., 0].
    """
    if not numbers.shape[-1]:
        nothing = numbers.new_empty(numbers.shape, dtype=dtype)
        return nothing, nothing
    wide = numbers.float()
    # Floats above 0 order as their bits, of which the mantissa is cut off upwards.
    bits = wide.abs().amax(-1, keepdim=True).view(torch.int32)
    scale = ((bits - _LARGEST_BITS[dtype] + _MANTISSA) >> _EXPONENT_BITS).add_(127).clamp_min_(1)
    broken = bits >= _INFINITY_BITS
    inverse = ((254 - scale) << _EXPONENT_BITS).view(torch.float32)
    scaled = (wide * inverse).masked_fill_(broken, 0)
    if dtype == torch.int8:
        codes = scaled.round_().to(torch.int8)
    else:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scale.masked_fill_(broken, _NO_NUMBER).to(torch.uint8).view(dtype)


def widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse: float32 [.., size]."""
    if codes.dtype == torch.int8:
        wide = codes.float()
    else:
        wide = codes.contiguous().view(torch.float8_e4m3fn).float()
    exponents = scales.view(torch.uint8).int()
    return wide.mul_((exponents << _EXPONENT_BITS).view(torch.float32))
