"""Which models the fused decoder computes, and what it must know of one beside its weights.

Most of a recipe is not read from the configuration. What a layer's attention is called with (scale,
window, soft cap, sinks) is what the model's own code passed when it was probed, and rotations are
those of the model's own rotary module: both are then right for every kind that transformers has.
What remains is a family's form. A model whose layers hold a weight that its family's form does not
use is not covered, because something would be left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from batonlm.engine.attention.interface import LayerArguments
from batonlm.engine.kept import KeptLinear
from batonlm.engine.linear import are_known_experts

MERGED_ATTENTION = ("q_proj", "k_proj", "v_proj")
MERGED_MLP = ("gate_proj", "up_proj")
"""Linear layers that the decoder makes one of."""
_LINEAR = nn.Linear, KeptLinear
_SILU = {"silu", "swish"}
_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}


class NotCovered(Exception):
    """The fused decoder does not compute this model. Its text says why."""


@dataclass(frozen=True, slots=True)
class Family:
    """What models of one type have in common."""

    experts: bool = False
    """Whether a layer's MLP may be a mixture of experts."""
    clamped: bool = False
    """Whether experts have GPT-OSS's gate instead of silu(gate) * up."""
    wide_scale: bool = False
    """Whether a norm multiplies by its weight before it rounds to the model's type, not after."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "phi3": Family(),
    "smollm3": Family(),
    "seed_oss": Family(),
    "mixtral": Family(experts=True),
    "qwen3_moe": Family(experts=True),
    "gpt_oss": Family(experts=True, clamped=True, wide_scale=True),
}
"""By transformers' model type. All add attention's output, then the MLP's, to what was put in, and
normalise by root mean square ahead of both."""

_ATTENTION = re.compile(
    r"(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight"
    r"|self_attn\.(q|k|v|o|qkv)_proj\.(linear\.)?(weight|bias)|self_attn\.sinks"
)
"""A product that ranks sum is a layer `linear` inside of theirs."""
_DENSE = re.compile(r"mlp\.(gate|up|gate_up|down)_proj\.(linear\.)?(weight|bias)")
_EXPERTS = re.compile(
    r"mlp\.(gate|router)\.(weight|bias)"
    # A rank's experts are in a module that sums them.
    r"|mlp\.experts\.(own\.)?(gate_up|down)_proj(_bias)?"
)


@dataclass(frozen=True, slots=True)
class Mixture:
    """How a token's experts are chosen and what they compute. A router's product scores experts;
    those with the highest scores are taken, and their shares are those of a softmax."""

    choices: int
    """Experts that a token takes."""
    normalised: bool
    """Whether the softmax is over the experts that are taken, not over all."""
    clamp: tuple[float, float] | None
    """Of GPT-OSS's gate the factor in the sigmoid and the limit; None for silu(gate) * up."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a covered model's layers compute."""

    head_size: int
    group: int
    """Query heads per KV head."""
    epsilon: float
    """What all norms add to the mean square."""
    wide_scale: bool
    """As in Family."""
    rotates: tuple[bool, ...]
    """Of each layer, whether queries and keys are rotated by their position."""
    attention: tuple[LayerArguments, ...]
    """Of each layer."""
    mixture: Mixture | None = None
    """Of all layers with experts; None where there are none."""


def read_recipe(network: nn.Module, attention: Sequence[LayerArguments]) -> Recipe:
    """The recipe of a network of transformers. attention: what each layer's was called with.

    Raises NotCovered, with the reason, for a model that is computed otherwise.
    """
    config: Any = network.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotCovered(f"models of type {config.model_type} have no recipe")
    if config.hidden_act not in _SILU:
        raise NotCovered(f"its activation is {config.hidden_act}")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in _FIXED_ROPES:
        raise NotCovered(f"rotary embeddings of type {rope} have no recipe")
    layers: Any = network.model.layers  # type: ignore[union-attr]
    for layer in layers:
        for name, _ in layer.named_parameters():
            dense = _DENSE.fullmatch(name) and not hasattr(layer.mlp, "experts")
            experts = family.experts and _EXPERTS.fullmatch(name)
            if not (_ATTENTION.fullmatch(name) or dense or experts):
                raise NotCovered(f"a layer has a weight {name} that the recipe does not use")
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            if type(getattr(layer.self_attn, name, None)) not in (*_LINEAR, type(None)):
                raise NotCovered(f"its {name} is no plain linear layer")
        for module, names in ((layer.self_attn, MERGED_ATTENTION), (layer.mlp, MERGED_MLP)):
            if not _join([getattr(module, name, None) for name in names]):
                raise NotCovered(f"weights of {', '.join(names)} are quantised differently")
        if hasattr(layer.mlp, "experts") and not _are_of(family, layer.mlp.experts):
            raise NotCovered("its experts are of an unknown form")
    own = [layer.self_attn for layer in layers]
    return Recipe(
        head_size=int(own[0].head_dim),
        group=int(own[0].num_key_value_groups),
        epsilon=float(config.rms_norm_eps),
        wide_scale=family.wide_scale,
        rotates=tuple(bool(getattr(each, "use_rope", True)) for each in own),
        attention=tuple(attention),
        mixture=_mixture(family, config) if family.experts else None,
    )


def _join(parts: Sequence[Any]) -> bool:
    """Whether these linear layers, where a layer has them, can be one."""
    kept = [part.kept for part in parts if isinstance(part, KeptLinear)]
    return not kept or (len(kept) == len(parts) and all(kept[0].joins(each) for each in kept))


def _are_of(family: Family, experts: Any) -> bool:
    experts = getattr(experts, "own", experts)
    if not are_known_experts(experts) or not experts.has_gate:
        return False
    return bool(experts.is_concatenated) != family.clamped


def _mixture(family: Family, config: Any) -> Mixture:
    clamp = None
    if family.clamped:
        clamp = float(config.swiglu_alpha), float(config.swiglu_limit)
    return Mixture(
        choices=int(config.num_experts_per_tok),
        normalised=bool(getattr(config, "norm_topk_prob", True)),
        clamp=clamp,
    )
