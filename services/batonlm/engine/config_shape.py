"""What a model of a known family is made of, from its config.json alone and without torch.

In: the configuration of a decoder of Llama's kind, dense or with experts. Out: its matrices and
vectors, and what memory they and KV take: the numbers that `footprint.foresee` finds by building
the model without weights, which takes seconds of imports. None for all that is not known to the
last parameter; a test compares both for every family here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batonlm.core.request.model import DTYPE_BYTES, row_bytes
from batonlm.core.request.prompt_logprobs import SCORED_POSITIONS
from batonlm.engine.config import EngineConfig
from batonlm.engine.memory import LAYER_COPIES, LOGIT_COPIES, quantized_bytes


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family differs from Llama, where its configuration does not say."""

    defaults: tuple[tuple[str, Any], ...] = ()
    """Of settings that config.json may lack."""
    window: int = 0
    """The sliding window where config.json has none; 0: no layer has one."""
    all_slide: bool = False
    """Whether all layers have the window where config.json does not list layers."""
    qkv_bias: str = "attention_bias"
    """The setting that gives queries, keys and values a bias; "" and "always"."""
    out_bias: str = "attention_bias"
    norms: int = 2
    """Of a layer, as wide as the model."""
    head_norms: str = ""
    """Of queries and keys: "head" has a head's width, "all" that of all heads."""
    fused: bool = False
    """Whether the gate and the other half of a layer's first product are one matrix."""
    fused_qkv: bool = False
    experts: bool = False
    expert_size: str = "intermediate_size"


_TIED = ("tie_word_embeddings", True)
_FAMILIES = {
    "llama": _Family(),
    "granite": _Family(),
    "smollm3": _Family((_TIED,)),
    "mistral": _Family(window=4096, all_slide=True, qkv_bias="", out_bias=""),
    "ministral": _Family(window=4096, qkv_bias="", out_bias=""),
    "qwen2": _Family(qkv_bias="always", out_bias=""),
    "qwen3": _Family((("head_dim", 128),), head_norms="head"),
    "seed_oss": _Family(
        (("head_dim", 128), ("attention_bias", True)), out_bias="attention_out_bias"
    ),
    "gemma2": _Family((("head_dim", 256), _TIED), window=4096, norms=4),
    "gemma3_text": _Family((("head_dim", 256), _TIED), window=4096, norms=4, head_norms="head"),
    "phi3": _Family(all_slide=True, qkv_bias="", out_bias="", fused=True, fused_qkv=True),
    "olmo2": _Family(head_norms="all"),
    "cohere": _Family((_TIED,), norms=1),
    "glm4": _Family(
        (("head_dim", 128), ("attention_bias", True)), out_bias="", norms=4, fused=True
    ),
    "mixtral": _Family(all_slide=True, qkv_bias="", out_bias="", experts=True),
    "qwen3_moe": _Family(head_norms="head", experts=True, expert_size="moe_intermediate_size"),
}
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_OTHERWISE = ("quantization_config", "text_config", "use_qk_norm", "mlp_only_layers")
"""Settings that make another model of it."""


@dataclass(frozen=True, slots=True)
class ConfigShape:
    """A model's sizes, in numbers of elements."""

    matrices: tuple[tuple[int, int, int], ...]
    """Of linear layers and experts, without the output layer: how many, outputs, inputs."""
    vectors: int
    """Parameters that are in no such matrix, nor in the embedding."""
    tied: bool
    hidden: int
    vocab: int
    widest: int
    """Most elements per token that one product of a layer makes."""
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    sliding_layers: int
    """How many look back over a window only."""
    positions: int
    """Of the longest sequence."""
    dtype: str
    """The number type that the configuration names; "" where it names none."""

    def weights_bytes(self, dtype: str, quantize: str, *, on_cpu: bool) -> int:
        """Of what an engine keeps. Packing on a CPU unties the output layer."""
        each = DTYPE_BYTES[dtype]
        head: tuple[tuple[int, int, int], ...] = ((1, self.vocab, self.hidden),)
        if self.tied and not on_cpu:
            head = ()
        others = self.vectors + self.vocab * self.hidden
        return others * each + sum(
            count * (quantized_bytes(outputs, inputs, quantize) or outputs * inputs * each)
            for count, outputs, inputs in (*self.matrices, *head)
        )

    def activation_bytes(self, config: EngineConfig, dtype: str) -> int:
        """Of the largest step, as `footprint.activation_bytes`."""
        each = DTYPE_BYTES[dtype]
        attention = (self.heads + 2 * self.kv_heads) * self.head_size
        width = self.hidden + self.widest + attention
        tokens = config.max_step_tokens * width * LAYER_COPIES * each
        sampled = config.max_batch * self.vocab * (each + 4 * LOGIT_COPIES)
        return tokens + sampled + min(SCORED_POSITIONS, config.max_step_tokens) * self.vocab * each

    def position_bytes(self, kept: str) -> int:
        """KV of one position in the pool. kept: a name of core's DTYPE_BYTES."""
        return self.layers * self.kv_heads * 2 * row_bytes(kept, self.head_size)


def shape_of(settings: Mapping[str, Any]) -> ConfigShape | None:
    """The shape of a model whose config.json this is; None where it is not known exactly."""
    family = _FAMILIES.get(str(settings.get("model_type")))
    if family is None or any(settings.get(name) for name in _OTHERWISE):
        return None
    if any(settings.get(name, default) is None for name, default in family.defaults):
        return None
    given = dict(family.defaults) | {k: v for k, v in settings.items() if v is not None}
    needed: tuple[str, ...] = _NEEDED
    if family.experts:
        # transformers writes the one, and most of the hub's files have the other.
        given["experts"] = given.get("num_local_experts", given.get("num_experts"))
        needed = (*_NEEDED, "experts", "num_experts_per_tok", family.expert_size)
    if not all(type(given.get(name)) is int and given[name] > 0 for name in needed):
        return None
    # Beyond some length these make a row depend on its neighbours, so that length is the longest.
    ropes = str(given.get("rope_parameters")) + str(given.get("rope_scaling"))
    types = _layer_types(family, settings)
    if (
        types is None
        or "dynamic" in ropes
        or "longrope" in ropes
        or set(types) - {"full_attention", "sliding_attention"}
        or given.get("decoder_sparse_step", 1) != 1
    ):
        return None
    hidden, layers, vocab = (given[n] for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, kv_heads = given["num_attention_heads"], given["num_key_value_heads"]
    size = given.get("head_dim") or hidden // heads
    queries, keys = heads * size, kv_heads * size

    def has(flag: str) -> bool:
        return flag == "always" or bool(flag and given.get(flag))

    parts = [queries + 2 * keys] if family.fused_qkv else [queries, keys, keys]
    matrices = [(1, outputs, hidden) for outputs in parts] + [(1, hidden, queries)]
    vectors = family.norms * hidden
    vectors += (queries + 2 * keys) * has(family.qkv_bias) + hidden * has(family.out_bias)
    vectors += {"": 0, "head": 2 * size, "all": queries + keys}[family.head_norms]
    inner = given[family.expert_size]
    widest = max(hidden, *parts)
    if family.experts:
        count, chosen = given["experts"], given["num_experts_per_tok"]
        matrices += [(count, 2 * inner, hidden), (count, hidden, inner)]
        vectors += count * hidden  # of the router
        widest = max(widest, chosen * max(2 * inner, hidden))
    else:
        first = [2 * inner] if family.fused else [inner, inner]
        matrices += [*((1, outputs, hidden) for outputs in first), (1, hidden, inner)]
        vectors += (2 * inner + hidden) * has("mlp_bias")
        widest = max(widest, *first)
    return ConfigShape(
        matrices=tuple((count * layers, outputs, inputs) for count, outputs, inputs in matrices),
        vectors=vectors * layers + hidden,
        tied=bool(given.get("tie_word_embeddings")),
        hidden=hidden,
        vocab=vocab,
        widest=widest,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        layers=layers,
        sliding_layers=sum(kind == "sliding_attention" for kind in types),
        positions=given["max_position_embeddings"],
        dtype=str(given.get("dtype") or given.get("torch_dtype") or ""),
    )


def _layer_types(family: _Family, settings: Mapping[str, Any]) -> list[str] | None:
    """The kinds of attention of the layers; empty where all look back over everything, None where
    only the model knows."""
    if types := settings.get("layer_types"):
        return list(types)
    slides = settings.get("use_sliding_window", True)
    if not (slides and settings.get("sliding_window", family.window)):
        return []
    return ["sliding_attention"] * settings["num_hidden_layers"] if family.all_slide else None
