"""Products with weights in 8 and 4 bits.

Weights are rounded at load, group by group or output by output, and scaled back in the product.
What is done to activations differs: `int8` and `fp8` round each row by its own size, `int8-weights`
and `int4` only to bfloat16, in which their products compute whatever the model's type.
"""

from __future__ import annotations

import logging
import time
import timeit
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch.nn.functional import ScalingType, linear, scaled_mm

from batonlm.core.errors import InvalidArgument
from batonlm.engine.exact import Product, random_rows
from batonlm.engine.memory import INT4_GROUP, quantized_bytes

log = logging.getLogger(__name__)

Bind = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""As a Form's."""

_FP8_CAPABILITY = (8, 9)
_INT4_GROUPS = (32, 64, 128, 256)
"""Sizes of groups that the product takes."""
_INT4_OUTPUTS = 16
"""It takes multiples of so many."""
_SLOW = 20.0
"""Times of a float32 product, from which on an int8 product is taken for oneDNN's reference."""


def settle(quantize: str, device: torch.device, dtype: torch.dtype) -> str:
    """What `quantize` of EngineConfig comes down to on a device: "none", "int8", "int8-weights",
    "int4" or "fp8".

    Without VNNI, oneDNN adds pairs of int8 products in 16 bits, which overflow without a sign: CPUs
    that have neither VNNI nor AMX round weights only, as do those on which oneDNN computes such
    products one by one. Raises InvalidArgument(field="quantize") where there are none at all.
    """
    if quantize in ("int8", "int4") and device.type != "cpu":
        raise InvalidArgument(
            f"quantize {quantize} is for CPUs; on {device.type} there is fp8", field="quantize"
        )
    if quantize == "int8" and not _has_int8_products():
        log.warning("this CPU does not multiply int8 quickly: int8 is of weights alone")
        return "int8-weights"
    if quantize == "fp8" and device.type == "cuda":
        if dtype != torch.bfloat16:
            raise InvalidArgument("quantize fp8 needs dtype bfloat16 on a GPU", field="quantize")
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
            raise InvalidArgument(
                "quantize fp8 needs a GPU of compute capability 8.9 or newer", field="quantize"
            )
    return quantize


def _has_int8_products() -> bool:
    features = torch.cpu.get_capabilities()
    named = any(features.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
    return named and _times_of_float32() < _SLOW


@lru_cache
def _times_of_float32() -> float:
    """How many times as long an int8 product takes as one of float32: about 1, or hundreds where
    oneDNN finds no kernel and takes its reference, as 3.12 does on an AMD EPYC with VNNI."""
    rows, weight = torch.ones(32, 256), torch.ones(256, 256)
    products = bind_int8(weight, None), partial(linear, weight=weight)
    rounded, plain = (
        min(timeit.repeat(partial(product, rows), number=1, repeat=5)) for product in products
    )
    return rounded / plain


def fits(weight: torch.Tensor, quantize: str) -> bool:
    """Whether a weight [outputs, inputs] becomes what `settle` returned; narrow ones do not."""
    outputs, inputs = weight.shape
    return bool(quantized_bytes(outputs, inputs, quantize))


# int8: weights are scaled per output, activations per row. A row is scaled by its own largest
# element, never by the batch's, so that it does not change with its neighbours. The sum over inputs
# is one of integers, which has no order: rows are bit-equal for any number of rows, on any CPU,
# without a proof per size.

_LEVELS = 127
# No row or output may have scale 0, or its zeros would become 0 / 0.
_TINY = 1e-30
_TRIED_ROWS = (1, 2, 4, 8, 16)
_CHECKED_OUTPUTS = 64
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, inputs] -> int8 [n, inputs] and scales [n, 1]: rows are about their product.

    A row that holds a number that is none gets such a scale, so that its product shows it too.
    """
    scales = rows.abs().amax(1, keepdim=True).mul_(1 / _LEVELS).clamp_min_(_TINY)
    return (rows / scales).round_().to(torch.int8), scales


def bind_int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    # Packing takes the integers as they lie, whatever their strides say.
    integers, scales = quantize_rows(weight.detach().float().contiguous())
    return bind_rounding8(integers, scales[:, 0].contiguous(), bias)


def bind_rounding8(
    integers: torch.Tensor, by_output: torch.Tensor, bias: torch.Tensor | None = None
) -> Product:
    """The product that rounds rows, with weights int8 [outputs, inputs] and their scales float32
    [outputs]."""
    packed = torch.ops.onednn.qlinear_prepack(integers, None)
    outputs, inputs = integers.shape
    no_offset = torch.zeros(outputs, dtype=torch.int32)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, inputs)
        quants, by_row = quantize_rows(flat if flat.dtype == torch.float32 else flat.float())
        output: torch.Tensor = multiply(
            quants, 1.0, 0, packed, by_output, no_offset, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        output.mul_(by_row)
        if bias is not None:
            output.add_(bias)
        return output.to(rows.dtype).view(*rows.shape[:-1], outputs)

    return product


def fewest_rows(bind: Bind, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """To how many rows fewer ones are padded: oneDNN has no fast product for few by few.

    (It takes milliseconds for one row by 256 outputs, and 30 microseconds for two.) Raises
    InvalidArgument when products are not those of the integers, as on CPUs whose sums overflow.
    """
    product = bind(weight, bias)
    rows = random_rows(weight.shape[1], torch.float32, weight.device, _TRIED_ROWS[-1])
    times = []
    for count in _TRIED_ROWS:
        some = rows[:count].to(weight.dtype)
        _check_sums(product(some), some, weight, bias)
        spent = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            product(some)
            spent = min(spent, time.perf_counter() - began)
        times.append(spent)
    return next(
        count for count, spent in zip(_TRIED_ROWS, times, strict=True) if spent <= 2 * times[-1]
    )


def _check_sums(
    output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    quants, by_row = quantize_rows(rows.float())
    integers, scales = quantize_rows(weight[:_CHECKED_OUTPUTS].detach().float())
    expected = (quants.double() @ integers.double().t()).float() * scales[:, 0] * by_row
    if bias is not None:
        expected = expected + bias[:_CHECKED_OUTPUTS]
    got = output[:, :_CHECKED_OUTPUTS].float()
    if not torch.allclose(got, expected, rtol=_ROUNDING[output.dtype], atol=1e-6):
        raise InvalidArgument(
            "quantize int8: this CPU's integer products are wrong", field="quantize"
        )


# Weights alone: torch's products read them in 8 or 4 bits, and compute in bfloat16. (They take
# other types, too, 15 times slower.) A row is computed by itself, in the same order for any number
# of rows; exact mode proves it.


def bind_int8_weights(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product with weights rounded as for `bind_int8`."""
    integers, scales = quantize_rows(weight.detach().float())
    return _in_bfloat16(bind_codes8(integers.contiguous(), scales[:, 0]), weight, bias)


def bind_codes8(codes: torch.Tensor, scales: torch.Tensor) -> Product:
    """The product of bfloat16 [n, inputs] with codes int8 [outputs, inputs] of scales [outputs]."""
    multiply, by_output = torch.ops.aten._weight_int8pack_mm.default, scales.bfloat16()
    return lambda rows: multiply(rows, codes, by_output)


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> codes of 0 to 15, uint8 [outputs, inputs], and bfloat16 [outputs,
    groups, 2]: scales and offsets. A weight is about (code - 8) * scale + offset."""
    outputs, inputs = weight.shape
    grouped = weight.float().view(outputs, inputs // INT4_GROUP, INT4_GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).clamp_min_(_TINY).bfloat16()
    offsets = (low + 8 * scales.float()).bfloat16()
    by_group = torch.stack((scales, offsets), -1)
    wide = by_group.float().unsqueeze(2)
    codes = ((grouped - wide[..., 1]) / wide[..., 0] + 8).round_().clamp_(0, 15)
    return codes.to(torch.uint8).view(outputs, inputs), by_group


def bind_int4(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product with weights of `quantize_groups`."""
    codes, by_group = quantize_groups(weight.detach())
    product = _packed4(codes.int(), by_group.transpose(0, 1).contiguous(), INT4_GROUP)
    return _in_bfloat16(product, weight, bias)


def takes_codes4(outputs: int, group: int) -> bool:
    """Whether there is a product of codes of 4 bits in such groups of inputs."""
    return outputs % _INT4_OUTPUTS == 0 and group in _INT4_GROUPS


def bind_codes4(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Product:
    """The product of bfloat16 [n, inputs] with int32 codes [outputs, inputs] of 0 to 15, whose
    scales and zeros are [groups, outputs]."""
    wide = scales.float()
    by_group = torch.stack((wide, (8 - zeros.float()) * wide), -1).bfloat16()
    return _packed4(codes, by_group, codes.shape[1] // len(scales))


def _packed4(codes: torch.Tensor, by_group: torch.Tensor, group: int) -> Product:
    """by_group: scales and offsets, bfloat16 [groups, outputs, 2]."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return lambda rows: multiply(rows, packed, group, by_group)


def _in_bfloat16(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Product:
    """A product of rows of any type, by one of bfloat16 [rows, inputs]."""
    outputs, inputs = weight.shape

    def product(rows: torch.Tensor) -> torch.Tensor:
        shape = *rows.shape[:-1], outputs
        flat = rows.reshape(-1, inputs)
        if not len(flat):
            return rows.new_empty(shape)
        output = multiply(flat.bfloat16()).to(rows.dtype)
        return (output if bias is None else output + bias).view(shape)

    return product


# fp8: weights are scaled per output and activations per row, as with int8, to the range of e4m3
# (4 bits of exponent, 3 of mantissa). Sums are floats, whose order the number of rows may change.

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def quantize_rows_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, inputs] -> float8_e4m3fn [n, inputs] and float32 scales [n, 1]: rows are about their
    product. A row that holds a number that is none becomes one of none."""
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True).mul_(1 / _LARGEST_FP8).clamp_min_(_TINY)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def bind_fp8(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held, scales = quantize_rows_fp8(weight.detach())
    outputs, inputs = weight.shape
    columns, by_output = held.t(), scales.t().contiguous()
    by_row_and_output = ScalingType.RowWise

    def product(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, inputs)
        shape = *rows.shape[:-1], outputs
        if not len(flat):
            return rows.new_empty(shape)
        quants, by_row = quantize_rows_fp8(flat)
        output: torch.Tensor = scaled_mm(
            quants, columns, by_row, by_row_and_output, by_output, by_row_and_output,
            output_dtype=rows.dtype,
        )  # fmt: skip
        if bias is not None:
            output = output + bias
        return output.view(shape)

    return product
