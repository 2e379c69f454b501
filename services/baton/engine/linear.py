"""Linear layers with weights packed once for this CPU; knows modules, but not their meaning.

`swap` replaces every linear layer of a model in place, one at a time, so that memory never holds
two copies of the whole model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from baton.engine.products import Product, prove, tiled


class PackedLinear(nn.Module):
    """Does what nn.Linear does, with oneDNN's packed weights where the CPU has them.

    exact: compute in proven row counts only. `weight` is left behind as a shape without memory,
    because some models look at its dtype.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        exact: bool,
        known: dict[tuple[object, ...], frozenset[int]],
    ):
        """weight: [outputs, inputs]. known: what was proven for shapes seen before, added to."""
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.weight = weight.detach().to("meta")
        self.bias = bias
        self._product = _packed(weight, bias) if _packs(weight) else _plain(weight, bias)
        self._sizes: frozenset[int] | None = None
        if exact:
            key = (*weight.shape, weight.stride(), weight.dtype, bias is None)
            if key not in known:
                known[key] = prove(self._product, weight.shape[1], weight.dtype, weight.device)
            self._sizes = known[key]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        if self._sizes is None:
            output = self._product(rows)
        else:
            output = tiled(self._product, rows, self._sizes)
        return output.view(*x.shape[:-1], self.out_features)


def swap(model: nn.Module, *, exact: bool) -> None:
    """Replaces nn.Linear and GPT-2's Conv1D. Raises NotExact when exact cannot be had."""
    known: dict[tuple[object, ...], frozenset[int]] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed = PackedLinear(child.weight, child.bias, exact=exact, known=known)
            elif type(child) is Conv1D:
                packed = PackedLinear(
                    child.weight.t().contiguous(), child.bias, exact=exact, known=known
                )
            else:
                continue
            setattr(parent, name, packed)


def _packs(weight: torch.Tensor) -> bool:
    """Packing pays in float32, and in bfloat16 on CPUs that multiply it natively."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def product(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, packed, bias, "none", [], ""
        )
        return output

    return product


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    held = weight.detach()

    def product(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, held, bias)

    return product
