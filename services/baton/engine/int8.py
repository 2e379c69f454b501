"""Linear layers in 8-bit integers: weights scaled per output, activations per row.

A row is scaled by its own largest element, never by the batch's, so that it does not change with
its neighbours. The sum over inputs is one of integers, which has no order: rows are bit-equal for
any number of rows, on any CPU, without a proof per size.
"""

from __future__ import annotations

import time

import torch

from baton.core.errors import InvalidArgument
from baton.engine.forms import Form
from baton.engine.products import Product, random_rows

_LEVELS = 127
# No row or output may have scale 0, or its zeros would become 0 / 0.
_TINY = 1e-30
# Outputs fewer than an eighth of the inputs: routers and gates, whose errors weigh most, are among
# these layers, and all of them together cost little.
_NARROW = 8
_TRIED_ROWS = (1, 2, 4, 8, 16)
_CHECKED_OUTPUTS = 64
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check_int8(device: torch.device) -> None:
    """Raises InvalidArgument(field="quantize") where int8 products do not exist or are not sound.

    Without VNNI, oneDNN adds pairs of products in 16 bits, which overflow without a sign.
    """
    if device.type != "cpu":
        raise InvalidArgument(
            f"quantize int8 is for CPUs; on {device.type} it does not exist yet", field="quantize"
        )
    features = torch.cpu.get_capabilities()
    if not (features.get("avx512_vnni") or features.get("avx_vnni") or features.get("amx_int8")):
        raise InvalidArgument(
            "quantize int8 needs a CPU with VNNI or AMX, which this one has not", field="quantize"
        )


def worth_quantizing(weight: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] becomes int8; narrow ones stay as they are."""
    outputs, inputs = weight.shape
    return outputs * _NARROW >= inputs


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, inputs] -> int8 [n, inputs] and scales [n, 1]: rows are about their product.

    A row that holds a number that is none gets such a scale, so that its product shows it too.
    """
    scales = rows.abs().amax(1, keepdim=True).mul_(1 / _LEVELS).clamp_min_(_TINY)
    return (rows / scales).round_().to(torch.int8), scales


def quantized() -> Form:
    """The form: oneDNN's packed int8 weights with a scale per output."""
    return Form("int8", _bind, lambda dtype, device: device.type == "cpu")


def _bind(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    # Packing takes the integers as they lie, whatever their strides say.
    integers, scales = quantize_rows(weight.detach().float().contiguous())
    packed = torch.ops.onednn.qlinear_prepack(integers, None)
    outputs, inputs = weight.shape
    by_output = scales[:, 0].contiguous()
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


def fewest_rows(form: Form, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """To how many rows fewer ones are padded: oneDNN has no fast product for few by few.

    (It takes milliseconds for one row by 256 outputs, and 30 microseconds for two.) Raises
    InvalidArgument when products are not those of the integers, as on CPUs whose sums overflow.
    """
    product = form.bind(weight, bias)
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
