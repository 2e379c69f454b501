"""The forms in which a matrix can lie in memory to be multiplied with.

A form is one copy of the weights and the product that reads it. Which one is fastest depends on the
CPU, the shape and the number of rows; `choice` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.engine.products import Product

# Products call torch's operators by their overload, because exact mode watches the functions of
# torch that modelling code calls, and would confine a second time what is proven here already.
_linear = torch.ops.aten.linear.default
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default


@dataclass(frozen=True, slots=True)
class Form:
    """bind: (weight [outputs, inputs], bias or None) -> Product, which may copy the weight.

    fits: whether tensors of this dtype on this device can be bound.
    """

    name: str
    bind: Callable[[torch.Tensor, torch.Tensor | None], Product]
    fits: Callable[[torch.dtype, torch.device], bool]


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held = weight.detach().contiguous()

    def product(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _linear(rows, held, bias)
        return output

    return product


def _transposed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held = weight.detach().t().contiguous()
    inputs, outputs = held.shape

    def product(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, inputs)
        output: torch.Tensor = _mm(flat, held) if bias is None else _addmm(bias, flat, held)
        return output.view(*rows.shape[:-1], outputs)

    return product


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = multiply(rows, packed, bias, "none", [], "")
        return output

    return product


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


PLAIN = Form("plain", _plain, lambda dtype, device: True)
"""As it came, [outputs, inputs]: read best one or two rows at a time."""

TRANSPOSED = Form(
    "transposed", _transposed, lambda dtype, device: dtype == torch.float32 and device.type == "cpu"
)
"""[inputs, outputs]: best for small matrices, because a call of it costs least."""

PACKED = Form("packed", _packed, _packs)
"""In oneDNN's blocks: best from about four rows on."""
