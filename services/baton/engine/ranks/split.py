"""Which slice of each weight a rank has.

Models say themselves how their layers split (`base_model_tp_plan`): linear layers by outputs
(colwise) or by inputs (rowwise), whose results are summed over ranks. Anything else in a plan is
refused: split wrongly, it would answer wrongly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.core.errors import InvalidArgument
from baton.engine.ranks.group import Group
from baton.engine.ranks.runner import FIELD

_COLWISE, _ROWWISE = "colwise", "rowwise"
_WHOLE = "replicated_with_grad_allreduce"
_KINDS = {_COLWISE, _ROWWISE, _WHOLE}
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The slice from `first` to `end` of a weight along `dim`."""

    dim: int
    first: int
    end: int


class SummedLinear(nn.Module):
    """A linear layer over a rank's inputs, summed over ranks; the bias is added once."""

    def __init__(self, linear: nn.Linear, group: Group):
        super().__init__()
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.linear = linear
        self.weight = linear.weight.detach().to("meta")
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., a rank's inputs] -> [..., outputs]."""
        total = self._group.sum(self.linear(x))
        return total if self.bias is None else total + self.bias


def check_split(settings: Any, size: int) -> dict[str, str]:
    """The plan of a model that splits over `size` ranks. Raises InvalidArgument, naming
    tensor_parallel."""
    text, name = settings.get_text_config(), settings.model_type
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise InvalidArgument(f"{name}: transformers has no plan to split it", field=FIELD)
    for pattern, kind in plan.items():
        if kind not in _KINDS:
            raise InvalidArgument(f"{name}: {pattern} ({kind}) is not split here", field=FIELD)
    heads = int(text.num_attention_heads)
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
    }
    for field, count in counts.items():
        if count % size:
            raise InvalidArgument(
                f"{name}: its {field} {count} is no multiple of {size}", field=FIELD
            )
    return plan


def shrink(network: nn.Module, plan: dict[str, str], rank: int, size: int) -> dict[str, Cut]:
    """Makes linear layers as small as a rank's; the network is on the meta device.

    Returns what is cut, by name of weight. Raises InvalidArgument, naming tensor_parallel, for a
    layer that does not divide or is not linear.
    """
    base = f"{network.base_model_prefix}."
    cuts: dict[str, Cut] = {}
    for name, module in list(network.named_modules()):
        kind = plan.get(_NUMBER.sub(".*", name.removeprefix(base)))
        if kind is None or kind == _WHOLE:
            continue
        if type(module) is not nn.Linear:
            raise InvalidArgument(f"{name} is no linear layer", field=FIELD)
        outputs, inputs = module.out_features, module.in_features
        whole = outputs if kind == _COLWISE else inputs
        if whole % size:
            raise InvalidArgument(f"the width {whole} of {name} does not divide", field=FIELD)
        share = whole // size
        cut = Cut(int(kind == _ROWWISE), rank * share, (rank + 1) * share)
        cuts[f"{name}.weight"] = cut
        if kind == _COLWISE:
            outputs = share
            cuts[f"{name}.bias"] = cut
        else:
            inputs = share
        dtype = module.weight.dtype
        has_bias = module.bias is not None
        smaller = nn.Linear(inputs, outputs, has_bias, device="meta", dtype=dtype)
        network.set_submodule(name, smaller)
    return cuts


def sum_up(network: nn.Module, plan: dict[str, str], group: Group) -> None:
    """Has layers that were split by inputs sum over ranks, once their weights are there."""
    base = f"{network.base_model_prefix}."
    for name, module in list(network.named_modules()):
        if plan.get(_NUMBER.sub(".*", name.removeprefix(base))) == _ROWWISE:
            assert isinstance(module, nn.Linear)
            network.set_submodule(name, SummedLinear(module, group))
