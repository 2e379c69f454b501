"""Builds tiny random-weight models with a tokenizer, saved as folders like any real model's.

torch is imported when a model is built: the GPU check lists architectures without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 1000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LATENT_MOE = {
    **_MOE,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
_GPT = {"bos_token_id": 1, "eos_token_id": 2}


def _without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in _BASE.items() if key not in names}


def _config(name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**settings)


ARCHS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("LlamaConfig", **_BASE),
    "llama_tied": lambda: _config("LlamaConfig", **_BASE, tie_word_embeddings=True),
    "qwen2": lambda: _config("Qwen2Config", **_BASE),
    "qwen3": lambda: _config("Qwen3Config", **_BASE, head_dim=32),
    "qwen3_moe": lambda: _config(
        "Qwen3MoeConfig", **_BASE, **_MOE, head_dim=16, num_experts=8, norm_topk_prob=True
    ),
    "mistral": lambda: _config("MistralConfig", **_BASE, sliding_window=24, head_dim=16),
    "ministral": lambda: _config("MinistralConfig", **_BASE, sliding_window=24, head_dim=16),
    "seed_oss": lambda: _config("SeedOssConfig", **_BASE, head_dim=16),
    "mixtral": lambda: _config(
        "MixtralConfig", **_BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "gemma2": lambda: _config(
        "Gemma2Config",
        **_BASE,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        **_without("num_hidden_layers"),
        num_hidden_layers=7,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    "phi3": lambda: _config("Phi3Config", **_BASE),
    "gpt_oss": lambda: _config(
        "GptOssConfig",
        **_BASE,
        head_dim=16,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "olmo2": lambda: _config("Olmo2Config", **_BASE),
    "deepseek_v3": lambda: _config(
        "DeepseekV3Config",
        **_without("num_key_value_heads"),
        **_LATENT,
        **_LATENT_MOE,
    ),
    "deepseek_v2": lambda: _config(
        "DeepseekV2Config",
        **_without("num_key_value_heads", "num_attention_heads", "hidden_size"),
        **_LATENT_MOE,
        hidden_size=80,
        num_attention_heads=5,
        num_key_value_heads=5,
        q_lora_rank=None,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        rope_parameters=_YARN,
    ),
    "cohere": lambda: _config("CohereConfig", **_BASE),
    "glm4": lambda: _config("Glm4Config", **_BASE, head_dim=16),
    "granite": lambda: _config("GraniteConfig", **_BASE),
    "smollm3": lambda: _config("SmolLM3Config", **_BASE),
    "gpt2": lambda: _config(
        "GPT2Config",
        **_GPT,
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
    ),
    "gpt_neox": lambda: _config("GPTNeoXConfig", **_without("num_key_value_heads")),
    "opt": lambda: _config(
        "OPTConfig",
        **_GPT,
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=1024,
        init_std=0.3,
    ),
}
"""Architectures that are served."""

LATENT: dict[str, Callable[[], Any]] = {
    "youtu": lambda: _config("YoutuConfig", **_without("num_key_value_heads"), **_LATENT),
    "minicpm3": lambda: _config("MiniCPM3Config", **_without("num_key_value_heads"), **_LATENT),
    "glm4_moe_lite": lambda: _config(
        "Glm4MoeLiteConfig", **_without("num_key_value_heads"), **_LATENT, **_LATENT_MOE
    ),
    "axk1": lambda: _config(
        "AXK1Config", **_without("num_key_value_heads"), **_LATENT, **_LATENT_MOE
    ),
    "longcat_flash": lambda: _config(
        "LongcatFlashConfig",
        **_without("num_key_value_heads", "num_hidden_layers", "intermediate_size"),
        **_LATENT,
        num_layers=2,
        num_hidden_layers=4,
        head_dim=8,
        ffn_hidden_size=128,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
}
"""More architectures with multi-head latent attention."""

OWN: dict[str, Callable[[], Any]] = {
    "falcon": lambda: _config(
        "FalconConfig", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_attention_heads=4
    ),
    "bloom": lambda: _config("BloomConfig", vocab_size=VOCAB, hidden_size=64, n_layer=3, n_head=4),
    "llama4": lambda: _config(
        "Llama4TextConfig",
        **_BASE,
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=4,
        attention_chunk_size=32,
    ),
    "stablelm": lambda: _config("StableLmConfig", **_BASE),
    "gemma4": lambda: _config(
        "Gemma4TextConfig",
        **_BASE,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        tie_word_embeddings=False,
    ),
}
"""Architectures that are served by their own attention."""

_HALF = ["linear_attention", "full_attention"] * 2
_FOUR = {**_without("num_hidden_layers"), "num_hidden_layers": 4}
_GATED = {
    **_FOUR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": _HALF,
}
_SCANNED = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_STATE = {"state_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

STATES: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: _config("Lfm2Config", **_FOUR, layer_types=["conv", "full_attention"] * 2),
    "jamba": lambda: _config(
        "JambaConfig",
        **_FOUR,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=16,
        mamba_dt_rank=8,
    ),
    "qwen3_next": lambda: _config(
        "Qwen3NextConfig",
        **_GATED,
        **_MOE,
        head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_5": lambda: _config("Qwen3_5TextConfig", **_GATED, head_dim=16),
    "mamba": lambda: _config(
        "MambaConfig",
        **_STATE,
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        time_step_rank=8,
        initializer_range=0.3,
    ),
    "mamba2": lambda: _config(
        "Mamba2Config",
        **_STATE,
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=16,
        initializer_range=0.3,
    ),
    "bamba": lambda: _config("BambaConfig", **_FOUR, **_SCANNED, attn_layer_indices=[1, 3]),
    "granitemoehybrid": lambda: _config(
        "GraniteMoeHybridConfig",
        **_FOUR,
        **_SCANNED,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        layer_types=_HALF,
    ),
    "falcon_h1": lambda: _config("FalconH1Config", **_BASE, **_SCANNED, mamba_d_ssm=128),
    "nemotron_h": lambda: _config(
        "NemotronHConfig",
        **_FOUR,
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        n_group=1,
        topk_group=1,
        time_step_min=1e-6,
    ),
    "minimax": lambda: _config(
        "MiniMaxConfig",
        **_FOUR,
        head_dim=16,
        block_size=16,
        num_local_experts=4,
        layer_types=_HALF,
    ),
    "rwkv": lambda: _config(
        "RwkvConfig",
        vocab_size=VOCAB,
        context_length=512,
        hidden_size=64,
        num_hidden_layers=4,
        eos_token_id=2,
        bos_token_id=1,
    ),
    "olmo_hybrid": lambda: _config(
        "OlmoHybridConfig",
        **_without("num_hidden_layers", "num_key_value_heads"),
        num_hidden_layers=4,
        num_key_value_heads=4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=_HALF,
    ),
}
"""Architectures whose layers keep a state of the sequence."""

REFUSED: dict[str, Callable[[], Any]] = {
    "moshi": lambda: _config(
        "MoshiConfig",
        **_BASE,
        ffn_dim=256,
        sliding_window=24,
        num_codebooks=2,
        audio_vocab_size=VOCAB,
        audio_encoder_config={"model_type": "mimi"},
    ),
}
"""Architectures that load but would answer wrongly."""


_WITH_HEAD = {"num_nextn_predict_layers": 1, "num_hidden_layers": 4}

HEADS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: _config(
        "DeepseekV3Config",
        **_without("num_key_value_heads", "num_hidden_layers"),
        **_LATENT,
        **_LATENT_MOE,
        **_WITH_HEAD,
    ),
    "glm4_moe": lambda: _config(
        "Glm4MoeConfig",
        **_without("num_hidden_layers"),
        **_LATENT_MOE,
        **_WITH_HEAD,
        head_dim=16,
        use_qk_norm=True,
    ),
    "mellum": lambda: _config(
        "MellumConfig",
        **_without("num_hidden_layers"),
        **_MOE,
        **_WITH_HEAD,
        head_dim=16,
        num_experts=4,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention"] * 2,
        mlp_layer_types=["sparse"] * 4,
    ),
}
"""Architectures with a head that foretells tokens; here it is the last layer, see
`save_with_head`."""

_HEAD_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""A head's own weights beside those of its layer, as most files name them, and as Mellum's do."""


def build(arch: str, *, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random float32 weights, in eval mode. changes: to its config."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = {**ARCHS, **LATENT, **OWN, **STATES, **REFUSED}[arch]()
    for name, value in changes.items():
        setattr(config, name, value)
    classes: Any = transformers.AutoModelForCausalLM
    model = classes.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def save_tiny_model(arch: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Saves model and tokenizer to `folder`, which is made, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    build(arch, seed=seed, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_with_head(arch: str, folder: Path, *, always_right: bool = False) -> Path:
    """Saves a model of three layers and a head, as checkpoints have them, and returns the folder.

    always_right: layers add nothing, so that each token follows from the one before, and the head
    knows which.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = HEADS[arch]()
    last = config.num_hidden_layers - 1
    classes: Any = transformers.AutoModelForCausalLM
    model = classes.from_config(config, attn_implementation="eager", dtype=torch.float32)
    # Saved by transformers, a layer's weights have the names that they have in checkpoints.
    model.save_pretrained(folder)
    size = config.hidden_size
    norms = [1 + torch.randn(size) / 10 for _ in range(3)]
    product = torch.randn(size, 2 * size) / 10
    weights = load_file(folder / "model.safetensors")
    if always_right:
        norms, product = [torch.ones(size) for _ in norms], torch.eye(size, 2 * size)
        silent = ("o_proj.weight", "down_proj.weight")
        weights |= {k: torch.zeros_like(v) for k, v in weights.items() if k.endswith(silent)}
    own = dict(zip(_HEAD_NAMES, (*norms[:2], product, norms[2]), strict=True))
    layer = f"model.layers.{last}."
    if arch == "mellum":
        weights = {k.replace(layer, "mtp.layers.0."): v for k, v in weights.items()}
        weights |= {f"mtp.{_HEAD_NAMES[name]}.weight": value for name, value in own.items()}
    else:
        weights |= {f"{layer}{name}.weight": value for name, value in own.items()}
        # Copies of the model's in published files, which nothing needs.
        unused = torch.zeros(config.vocab_size, size)
        names = "embed_tokens", "shared_head.head"
        weights |= {f"{layer}{name}.weight": unused.clone() for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] = last
    for name in ("layer_types", "mlp_layer_types"):
        if name in settings:
            settings[name] = settings[name][:last]
    (folder / "config.json").write_text(json.dumps(settings))
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of at most VOCAB tokens, trained on a few words, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [__doc__ or "", json.dumps(_BASE), "The quick brown fox jumps over the lazy dog. " * 3]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=_SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
