"""Experts of mixture models, one packed matrix each; knows how transformers stores them.

Tokens are sorted by expert once, and every expert that was chosen multiplies its rows. The batched
forms that transformers has for GPUs are up to 60 times slower on CPUs, and make a token's bits
depend on how many others chose its expert.
"""

from __future__ import annotations

import torch
from torch import nn

from baton.engine.choice import Bound, Chooser

_KINDS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class PackedExperts(nn.Module):
    """Takes the place of a module that `are_known_experts`, whose weights it takes away.

    What lies between the two products (gates, clamps, activations) stays the module's own.
    """

    def __init__(self, own: nn.Module, chooser: Chooser):
        """Raises NotExact in exact mode when an expert's rows depend on their neighbours."""
        super().__init__()
        self.own = own
        into, out_of = _names(own)
        self._into = _bind(own, into, chooser)
        self._out_of = _bind(own, out_of, chooser)
        for name, _ in list(own.named_parameters(recurse=False)):
            delattr(own, name)

    @property
    def products(self) -> list[Bound]:
        return [*self._into, *self._out_of]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden], chosen experts and their weights [tokens, k] -> [tokens, hidden].

        A token's experts are added in the order they were chosen in, so that its bits do not depend
        on how the others chose.
        """
        tokens, choices = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=len(self._into)).tolist()
        active = [expert for expert, count in enumerate(counts) if count]
        shares = [counts[expert] for expert in active]
        rows = hidden_states[order.div(choices, rounding_mode="floor")]
        inner = self._between(_each(self._into, active, rows, shares))
        outer = _each(self._out_of, active, inner, shares)
        if getattr(self.own, "has_post_expert_norm", False):
            outer = self.own.post_expert_norm(outer)  # type: ignore[operator]
        by_choice = torch.empty_like(outer)
        by_choice[order] = outer
        weighted = by_choice.view(tokens, choices, -1) * top_k_weights.unsqueeze(-1)
        total = weighted[:, 0]
        for choice in range(1, choices):
            total = total + weighted[:, choice]
        return total.to(hidden_states.dtype)

    def _between(self, inner: torch.Tensor) -> torch.Tensor:
        if self.own.has_gate:
            gated: torch.Tensor = self.own._apply_gate(inner)  # type: ignore[operator]
            return gated
        active: torch.Tensor = self.own.act_fn(inner)  # type: ignore[operator]
        return active


def are_known_experts(module: nn.Module) -> bool:
    """Whether this is a module of experts that says how its weights lie, and has no others."""
    if not all(isinstance(getattr(module, kind, None), bool) for kind in _KINDS):
        return False
    names = _names(module)
    expected = {*names, *(f"{name}_bias" for name in names if module.has_bias)}
    own = dict(module.named_parameters(recurse=False))
    return set(own) == expected and all(own[name].dim() == 3 for name in names)


def _names(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _bind(module: nn.Module, name: str, chooser: Chooser) -> list[Bound]:
    weights = module.get_parameter(name).detach()
    biases = module.get_parameter(f"{name}_bias").detach() if module.has_bias else None
    return [
        chooser.bind(
            weight.t() if module.is_transposed else weight,
            None if biases is None else biases[expert],
        )
        for expert, weight in enumerate(weights)
    ]


def _each(
    products: list[Bound], active: list[int], rows: torch.Tensor, shares: list[int]
) -> torch.Tensor:
    """Rows sorted by expert, each expert's share through its product."""
    pieces = zip(active, torch.split(rows, shares), strict=True)
    return torch.cat([products[expert](piece) for expert, piece in pieces])
