"""The decoder: a model's layers in about ten calls each, over the weights of transformers' modules.

Queries, keys and values come from one product, a gated MLP's two halves from another. A merged
weight replaces the weights that it is made of: theirs become views of it, so that transformers'
modules stay what they were, and nothing is in memory twice. All other modules (embedding, output
products, head) are used as they are, whatever has been done to them: ranks sum in theirs.

`Operators` are the steps between products. The plain ones below run everywhere and define what
Triton's do. They round where transformers rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from batonlm.engine.attention.interface import AttentionContext, ForwardPass, LayerArguments
from batonlm.engine.fused.recipe import MERGED_ATTENTION, MERGED_MLP, Mixture, Recipe
from batonlm.engine.kept import KeptLinear


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's attention: its heads and what is done to them."""

    arguments: LayerArguments
    queries: int
    """Query heads, of this rank."""
    keys: int
    """KV heads, of this rank."""
    query_norm: torch.Tensor | None
    """[head_size], weights of the norm over each query; None where queries have none."""
    key_norm: torch.Tensor | None
    """The same of keys."""
    rotated: bool
    """Whether queries and keys are rotated by their position."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotations of a step's rows. An element of the first half turns together with one of the
    second; what a head has behind the two halves, in some models, does not turn."""

    cosines: torch.Tensor
    """[T, rotated]."""
    sines: torch.Tensor
    """[T, rotated]; the first half has its sign turned."""

    @classmethod
    def of(cls, rotary: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> Rotation:
        """What the model's own rotary module gives, in the type of hidden. positions: int64
        [1, T]."""
        cosines, sines = rotary(hidden, positions)
        half = len(rotary.inv_freq)  # type: ignore[arg-type]
        cosines, sines = cosines[0, :, :half], sines[0, :, :half]
        return cls(torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1))


class Operators(Protocol):
    """What lies between the products of a layer. T: rows, one per token."""

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size], by root mean square."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Adds delta to hidden, in place, and returns the norm of the sum. All are [T, size]."""

    def attend(
        self, context: AttentionContext, heads: Heads, merged: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Attention's output [T, query heads * value size].

        merged: [T, (queries + 2 * keys) * head_size], of each row the queries, keys and values. It
        is written over.
        """

    def gate(self, merged: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size], gates and then what they scale -> [T, size]."""

    def route(self, logits: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of experts [T, experts] -> the chosen ones, whole numbers [T, choices], and their
        shares, float32 [T, choices]."""

    def experts(self, own: nn.Module, mixture: Mixture) -> nn.Module:
        """Experts over the weights of transformers' module `own`: (hidden [T, size], chosen,
        shares) -> [T, size]. A share of 0 adds nothing."""


class PlainOperators:
    """Torch's operators, on every device."""

    def __init__(self, recipe: Recipe):
        self._epsilon = recipe.epsilon
        self._wide_scale = recipe.wide_scale

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._epsilon))
        if self._wide_scale:
            return (wide * scale).mul(weight).to(hidden.dtype)
        return (wide * scale).to(hidden.dtype).mul_(weight)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return self.norm(hidden.add_(delta), weight)

    def attend(
        self, context: AttentionContext, heads: Heads, merged: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        queries, keys = heads.queries, heads.keys
        by_head = merged.view(len(merged), queries + 2 * keys, -1)
        turning = by_head.narrow(1, 0, queries + keys)
        if heads.query_norm is not None and heads.key_norm is not None:
            query, key = torch.split(turning, [queries, keys], 1)
            normed = self.norm(query, heads.query_norm), self.norm(key, heads.key_norm)
            turning = torch.cat(normed, 1)
        if heads.rotated:
            _turn(turning, rotation)
        query, key = torch.split(turning.transpose(0, 1), [queries, keys])
        value = by_head.narrow(1, queries + keys, keys).transpose(0, 1)
        return context(heads.arguments, query, key, value).flatten(1)

    def gate(self, merged: torch.Tensor) -> torch.Tensor:
        gate, up = merged.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def route(self, logits: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float()
        if mixture.normalised:
            top, chosen = wide.topk(mixture.choices)
            return chosen, top.softmax(-1)
        shares, chosen = wide.softmax(-1).topk(mixture.choices)
        return chosen, shares

    def experts(self, own: nn.Module, mixture: Mixture) -> nn.Module:
        # The module itself, in whose place packed ones are put.
        return own


def _turn(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotates [T, heads, head_size] in place."""
    size = rotation.cosines.shape[-1]
    part = heads if size == heads.shape[-1] else heads[..., :size]
    across = part.roll(size // 2, -1).mul_(rotation.sines.unsqueeze(1))
    part.mul_(rotation.cosines.unsqueeze(1)).add_(across)


class LinearPart(NamedTuple):
    """A linear layer of transformers', as the outputs of one that computes it."""

    name: str
    """In transformers' network."""
    module: nn.Module
    first: int
    """Its first output there."""
    outputs: int


class GatedMlp(nn.Module):
    """down(silu(gate) * up), the products into gate and up being one."""

    def __init__(self, own: Any, operators: Operators):
        """own: transformers' module, whose weights it shares."""
        super().__init__()
        self.gate_up = _merged(own, MERGED_MLP, "gate_up_proj")
        self.down = own.down_proj
        self._operators = operators

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self._operators.gate(self.gate_up(normed)))
        return output


class MixtureMlp(nn.Module):
    """A router and experts, of which each token takes some."""

    def __init__(self, own: Any, mixture: Mixture, operators: Operators):
        """own: transformers' module, whose weights it shares."""
        super().__init__()
        self.router = own.gate if hasattr(own, "gate") else own.router
        found = own.experts
        # A rank's experts are in a module that sums them.
        is_shared = hasattr(found, "around")
        made = operators.experts(found.own if is_shared else found, mixture)
        self.experts = found.around(made) if is_shared else made
        self._mixture, self._operators = mixture, operators

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        router = self.router
        logits = F.linear(normed, router.weight, getattr(router, "bias", None))
        output: torch.Tensor = self.experts(normed, *self._operators.route(logits, self._mixture))
        return output


class Layer(nn.Module):
    """One layer, over the weights of transformers' own."""

    def __init__(self, own: Any, recipe: Recipe, index: int, operators: Operators):
        super().__init__()
        attention = own.self_attn
        self._parts = {
            "merged": _sizes(attention, "self_attn", MERGED_ATTENTION, "qkv_proj"),
            "mlp.gate_up": _sizes(own.mlp, "mlp", MERGED_MLP, "gate_up_proj"),
        }
        self.merged = _merged(attention, MERGED_ATTENTION, "qkv_proj")
        self.output = attention.o_proj
        self.mlp: nn.Module
        if hasattr(own.mlp, "experts"):
            assert recipe.mixture is not None
            self.mlp = MixtureMlp(own.mlp, recipe.mixture, operators)
        else:
            self.mlp = GatedMlp(own.mlp, operators)
        self.first_norm = own.input_layernorm.weight
        self.second_norm = own.post_attention_layernorm.weight
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
        width = self.merged.out_features // recipe.head_size
        keys = width // (recipe.group + 2)
        self._heads = Heads(
            recipe.attention[index], width - 2 * keys, keys, query_norm, key_norm,
            recipe.rotates[index],
        )  # fmt: skip
        self._operators = operators

    def linear_parts(self) -> Iterator[LinearPart]:
        """By names within the layer; experts and their router are no linear layers."""
        for path, sizes in self._parts.items():
            first = 0
            for name, outputs in sizes:
                yield LinearPart(name, self.get_submodule(path), first, outputs)
                first += outputs
        last = {"self_attn.o_proj": self.output, "mlp.down_proj": getattr(self.mlp, "down", None)}
        for name, module in last.items():
            if module is not None:
                yield LinearPart(name, module, 0, module.out_features)

    def forward(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Leaves in hidden [T, hidden size] the sum behind attention, and returns what the MLP adds
        to it. delta: what the layer before adds."""
        operators = self._operators
        if delta is None:
            normed = operators.norm(hidden, self.first_norm)
        else:
            normed = operators.add_norm(hidden, delta, self.first_norm)
        attended = operators.attend(context, self._heads, self.merged(normed), rotation)
        normed = operators.add_norm(hidden, self.output(attended), self.second_norm)
        output: torch.Tensor = self.mlp(normed)
        return output


class Decoder(nn.Module):
    """Computes what a wired network of transformers does, and shares its weights."""

    def __init__(self, network: Any, recipe: Recipe, operators: Operators):
        """network: one that `read_recipe` covers. Its merged weights are moved."""
        super().__init__()
        self.config = network.config
        self.embedding = network.model.embed_tokens
        self.rotary = network.model.rotary_emb
        own = enumerate(network.model.layers)
        self.layers = nn.ModuleList(Layer(each, recipe, i, operators) for i, each in own)
        self.norm = network.model.norm
        self.head = network.lm_head
        self._operators = operators

    def linear_parts(self) -> Iterator[LinearPart]:
        """Where the linear layers of transformers' layers are computed now."""
        for i, layer in enumerate(self.layers):
            for part in layer.linear_parts():  # type: ignore[operator]
                yield part._replace(name=f"model.layers.{i}.{part.name}")

    def get_output_embeddings(self) -> nn.Module:
        """The product into logits, by the name that transformers gives it."""
        head: nn.Module = self.head
        return head

    def forward(self, inputs: ForwardPass) -> torch.Tensor:
        """Logits [S, vocab] of the sampled rows; [S, 0] where other stages compute them. The inputs
        have a context."""
        assert inputs.context is not None
        hidden: torch.Tensor = self.embedding(inputs.token_ids)[0]
        rotation = Rotation.of(self.rotary, hidden, inputs.positions)
        delta = None
        for layer in self.layers:
            delta = layer(hidden, delta, rotation, inputs.context)
        assert delta is not None
        if not hasattr(self.norm, "weight"):
            # A stage: other ranks have the layers that follow.
            self.norm(hidden.add_(delta))
            return hidden.new_empty(len(inputs.sampled), 0)
        sampled = hidden.index_select(0, inputs.sampled)
        delta = delta.index_select(0, inputs.sampled)
        logits: torch.Tensor = self.head(self._operators.add_norm(sampled, delta, self.norm.weight))
        return logits


def take_layers(network: Any) -> None:
    """Leaves the network of transformers without layers and head, when a Decoder stands for it:
    nothing else then holds the weights that the decoder packs."""
    network.model.layers = nn.ModuleList()
    network.lm_head = nn.Identity()


def _sizes(own: Any, name: str, names: Sequence[str], merged_name: str) -> list[tuple[str, int]]:
    """Names and outputs of what `_merged` makes one of, in order; none where there are none."""
    found = [merged_name] if hasattr(own, merged_name) else names
    return [
        (f"{name}.{each}", getattr(own, each).out_features) for each in found if hasattr(own, each)
    ]


@torch.no_grad()
def _merged(own: nn.Module, names: Sequence[str], merged_name: str) -> nn.Linear | KeptLinear:
    """One linear layer for several with the same inputs: their outputs one behind the other."""
    merged: nn.Linear
    found = getattr(own, merged_name, None)
    if found is not None:
        merged = found
        return merged
    modules = [own.get_submodule(name) for name in names]
    kept = [module for module in modules if isinstance(module, KeptLinear)]
    if kept:
        return KeptLinear.joined(kept)
    parts: list[nn.Linear] = modules  # type: ignore[assignment]
    sizes = [part.out_features for part in parts]
    merged = nn.Linear(
        parts[0].in_features,
        sum(sizes),
        bias=parts[0].bias is not None,
        device="meta",
    )
    for kind in ("weight", "bias") if parts[0].bias is not None else ("weight",):
        whole = torch.cat([part.get_parameter(kind) for part in parts])
        merged.register_parameter(kind, nn.Parameter(whole, requires_grad=False))
        for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
            part.register_parameter(kind, nn.Parameter(piece, requires_grad=False))
    return merged
