"""Numbers of `engine.kv.scaled` in kernels: the same codes and scales, bit by bit.

e4m3 is bytes to the compiler, and what they mean is computed from their bits: GPUs before compute
capability 8.9 have no instruction that reads or writes them. KIND is the type of codes, int8 or
uint8 of e4m3.
"""

from __future__ import annotations

import triton.language as tl

from batonlm.engine.attention.triton.jit import jit


@jit
def widened(code: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """float32 numbers of codes, and of scales that broadcast to them."""
    if code.dtype == tl.int8:
        number = code.to(tl.float32)
    else:
        bits = code.to(tl.int16)
        # The same bits as float16, whose exponents are 8 higher.
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        number = half.to(tl.float32)
    return number * ((scale.to(tl.int32) & 0xFF) << 23).to(tl.float32, bitcast=True)


@jit
def largest_bits(number: tl.tensor) -> tl.tensor:
    """float32 [rows, size] -> int32 [rows], which order as the rows' largest magnitudes do, NaN
    above all."""
    return tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@jit
def scale_of(largest: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The scale, int32, of rows with these `largest_bits`."""
    LARGEST: tl.constexpr = 0x42FE0000 if tl.int8 == KIND else 0x43E00000
    scale = tl.maximum(((largest - LARGEST + 0x7FFFFF) >> 23) + 127, 1)
    return tl.where(largest >= 0x7F800000, 255, scale)


@jit
def code_of(number: tl.tensor, scale: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The codes of float32 numbers under int32 scales that broadcast to them."""
    scaled = number * ((254 - scale) << 23).to(tl.float32, bitcast=True)
    if tl.int8 == KIND:
        # The last bits of floats from 2**23 on count ones.
        code = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Rounded to three bits of mantissa, to even; the exponent's bias is 7 and not 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 codes count steps of 2**-9, which are the last bits of floats around 2**14.
        steps = size.to(tl.float32, bitcast=True) + 16384.0
        small = steps.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    return tl.where(scale == 255, 0, code).to(KIND)
