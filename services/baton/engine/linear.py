"""Linear layers with weights packed once for this CPU.

`swap` replaces every linear layer and, on CPUs, all experts of a model in place, one at a time, so
that memory never holds two copies of the whole model.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from baton.engine.choice import Bound, Chooser
from baton.engine.experts import PackedExperts, are_known_experts
from baton.engine.products import BASE, MOST

log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """Does what nn.Linear does, in the form that the chooser finds best.

    `weight` is left behind as a shape without memory, because some models look at its dtype.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, chooser: Chooser, *, most: int = MOST
    ):
        """weight: [outputs, inputs]. most: rows computed at once in exact mode. Raises NotExact."""
        super().__init__()
        self.weight = weight.detach().to("meta")
        self.bias = bias
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._product = chooser.bind(weight, bias, most=most)

    @property
    def products(self) -> list[Bound]:
        return [self._product]

    @property
    def sizes(self) -> frozenset[int] | None:
        """Numbers of rows that are computed without cutting or padding; None: any."""
        return self._product.choice.sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self._product(x)


def swap(
    network: nn.Module, *, exact: bool, quantize: str = "none", max_batch: int = 64
) -> frozenset[int]:
    """Replaces nn.Linear, GPT-2's Conv1D and experts.

    quantize: "none" or "int8". max_batch: how many sequences a step decodes at most. Returns the
    numbers of rows that all layers compute as they are; none when they do so with any. Raises
    NotExact when exact cannot be had; `loosen` then makes the best of it.
    """
    common: set[int] | None = None
    chooser = Chooser(exact=exact, quantize=quantize, max_batch=max_batch)
    head = getattr(network, "get_output_embeddings", lambda: None)()
    on_cpu = all(weight.device.type != "cuda" for weight in network.parameters())
    logits_rows = min(MOST, max(BASE, max_batch))
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                # Logits are computed for the rows that are sampled only, so never for many.
                most = logits_rows if child is head else MOST
                packed: nn.Module = PackedLinear(child.weight, child.bias, chooser, most=most)
            elif type(child) is Conv1D:
                packed = PackedLinear(child.weight.t(), child.bias, chooser)
            elif on_cpu and are_known_experts(child):
                packed = PackedExperts(child, chooser)
            else:
                continue
            setattr(parent, name, packed)
            if isinstance(packed, PackedLinear) and child is not head and packed.sizes is not None:
                common = set(packed.sizes) if common is None else common & packed.sizes
    log.info("weights: %s", chooser.summary())
    return frozenset(common or ())


def loosen(network: nn.Module, *, quantize: str = "none", max_batch: int = 64) -> None:
    """Gives exactness up after NotExact: swaps what was not swapped yet, and computes any rows."""
    for module in network.modules():
        if isinstance(module, (PackedLinear, PackedExperts)):
            for product in module.products:
                product.loosen()
    swap(network, exact=False, quantize=quantize, max_batch=max_batch)
