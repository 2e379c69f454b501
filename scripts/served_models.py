"""Tries every causal model type of the installed transformers as a tiny model with random weights.

    python scripts/served_models.py                    # writes docs/models.md and its facts
    python scripts/served_models.py bloom qwen3_next   # tries these anew

A type is served when every greedy token equals what transformers generates, for prompts of 1 to 70
tokens at once, in one piece, in chunks over scattered blocks, and with a prefix whose KV came from
another pool. What is refused is refused at load, with the reason that the table shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batonlm.core.errors import InvalidArgument
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import fill, generate, packed, random_prompts, scattered, together

ROOT = Path(__file__).resolve().parents[1]
PAGE, FACTS = ROOT / "docs/models.md", ROOT / "docs/served-models.json"
START, END = "<!-- served models -->\n", "<!-- end -->"
LENGTHS = (1, 5, 16, 17, 24, 33, 50, 70)
BLOCKS = 6
"""Of a sequence, beside those of its state."""
POOL = 2048
NEW_TOKENS = 8
PREFIX = 20
MOST_PARAMETERS = 100_000_000

VOCAB = 320
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "embedding_dim": 64,
    "embedding_size": 64,
    "dim": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "dim_ff": 96,
    "dff": 96,
    "d_inner": 96,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_head": 16,
    "d_kv": 16,
    "dim_head": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "max_target_positions": 512,
    "sliding_window": 24,
    "sliding_window_size": 24,
    "attention_window_size": 24,
    "window_size": 24,
    "local_attention": 24,
    "attention_chunk_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 128,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 128,
    "time_step_rank": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "attention_hidden_size": 64,
    "lru_width": 64,
    "word_embed_proj_dim": 64,
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "type_vocab_size": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "init_std": 0.3,
}
"""What most configurations call their sizes, with small ones."""

_HALF = ["linear_attention", "full_attention"] * 2
_LISTED: dict[str, Any] = {"layer_types": _HALF}
_LATENT_SIZES = {"num_key_value_heads": 4, "head_dim": 8}
_DECODER = {"encoder_layers": 4}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "embed_dim": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "output_channels": 64,
    "mlp_dim": 32,
    "window_size": 4,
    "image_size": 32,
    "patch_size": 16,
    "num_layers": 1,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 101,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
    "heads_per_ngram": 2,
    "hc_lowrank": 8,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "num_key_value_heads": 2,
}
_BYTES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_BESIDE_BYTES = {**_BYTES, "hidden_size_global": 128}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_LISTED, **_LATENT_SIZES, "num_key_value_heads": 4, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    **{
        kind: _DECODER
        for kind in (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
        )
    },
    "prophetnet": {"num_encoder_layers": 4, "num_decoder_layers": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "blt": {
        "patcher_config": _BYTES,
        "encoder_config": _BESIDE_BYTES,
        "decoder_config": _BESIDE_BYTES,
        "global_config": {**_BYTES, "hidden_size": 128},
        "encoder_hash_byte_group_vocab": 64,
    },
    # transformers reads the base of its rotary embedding where its own configuration has none.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_LISTED, "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "kimi_linear": {**_LISTED, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    # transformers' step of one position does not know this limit, and that of several does.
    "nemotron_h": {"time_step_min": 1e-6},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
            "crop_size": 32,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
        },
    },
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 48],
        "attention_head_size": 16,
        "feed_forward_size": 64,
        "num_hidden_layers": 4,
        "attn_layers": ["local", "lsh"] * 2,
    },
    "xlstm": {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "num_blocks": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "num_mem_blocks": 1,
        "time_step_min": 1e-6,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
}
"""What single types need beside `SMALL`."""
WHOLE: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}
"""What types need that have no default configuration."""
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
            "downsample_hidden_size": 8,
        },
    }
}
"""What parts beside the text need beside `_VISION`."""


def small_config(kind: str) -> Any:
    """A configuration of this type, of few small layers."""
    config_class = transformers.CONFIG_MAPPING[kind]
    own = OWN.get(kind, {})
    whole = config_class(**WHOLE.get(kind, {}))
    text = whole.get_text_config(decoder=True)
    if text is whole:
        return _shrunk(config_class, whole, own)
    names = [k for k, v in vars(whole).items() if v is text]
    if not names:
        return _shrunk(config_class, whole, own)
    parts = {names[0]: _shrunk(type(text), text, own).to_dict()}
    for name, part in vars(whole).items():
        if isinstance(part, PretrainedConfig) and name not in parts:
            parts[name] = {k: v for k, v in _VISION.items() if k in vars(part)}
            parts[name] |= BESIDE.get(kind, {}).get(name, {})
    return config_class(**parts)


def _shrunk(config_class: Any, default: Any, own: dict[str, Any]) -> Any:
    names = set(vars(default)) | set(getattr(config_class, "__dataclass_fields__", {}))
    given = {k: v for k, v in SMALL.items() if k in names}
    if "kv_lora_rank" in names:
        given |= _LATENT_SIZES
    names_of = getattr(config_class, "attribute_map", {})
    given = {k: v for k, v in given.items() if k not in names_of}
    if getattr(default, "sliding_window", None) is None:
        given.pop("sliding_window", None)
    given |= own
    if "is_decoder" in names:
        given["is_decoder"] = True
    return config_class(**given)


class Outcome(NamedTuple):
    """What became of one type."""

    how: str
    """served, served alone (by the model's own attention), refused, untried, WRONG or FAILS."""
    why: str = ""


def outcome(kind: str) -> Outcome:
    try:
        config = small_config(kind)
    except Exception as error:
        return Outcome("untried", f"no small configuration of it was found: {_first_line(error)}")
    try:
        model = tiny_model(config)
    except TooLarge as error:
        return Outcome("untried", _first_line(error))
    except Exception as error:
        return _unmade(config, f"transformers makes no model of it: {_first_line(error)}")
    prompts = random_prompts(LENGTHS, VOCAB)
    try:
        wanted = [transformers_tokens(model, prompt) for prompt in prompts]
    except Exception as error:
        wanted, lacks = [], f"transformers does not generate with it: {_first_line(error)}"
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / kind
        try:
            model.save_pretrained(folder)
            return _served(folder, prompts, wanted) if wanted else _loaded(folder, lacks)
        except InvalidArgument as error:
            return Outcome("refused", error.message)
        except Exception as error:
            return Outcome("FAILS", _first_line(error))


def _unmade(config: Any, lacks: str) -> Outcome:
    """Of a type that transformers makes no model of, so that there are no weights of it."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / config.model_type
        config.save_pretrained(folder)
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
        try:
            return _loaded(folder, lacks)
        except InvalidArgument as error:
            return Outcome("refused", error.message)
        except Exception as error:
            return Outcome("FAILS", _first_line(error))


def _loaded(folder: Path, lacks: str) -> Outcome:
    """Raises InvalidArgument where it is refused."""
    TorchRunner.load(EngineConfig(str(folder), num_blocks=POOL)).close()
    return Outcome("untried", lacks)


def _served(folder: Path, prompts: list[list[int]], wanted: list[list[int]]) -> Outcome:
    config = EngineConfig(str(folder), num_blocks=POOL, exact=False)
    runner, other = TorchRunner.load(config), TorchRunner.load(config)
    front = runner.layout.state_blocks(runner.block_size)
    blocks = front + BLOCKS
    one, apart = together(len(prompts), blocks), scattered(len(prompts), blocks)
    front *= runner.block_size
    found = {
        "in one piece": generate(runner, prompts, one, NEW_TOKENS),
        "in chunks": generate(runner, prompts, apart, NEW_TOKENS, chunk=7),
    }
    for prompt, here, there in zip(prompts, one, apart, strict=True):
        if count := min(PREFIX, len(prompt) - 1):
            fill(runner, prompt[:count], here)
            count += front
            other.unpack(there, 0, count, memoryview(packed(runner, here, 0, count)))
    found["handed over"] = generate(other, prompts, apart, NEW_TOKENS, start=PREFIX)
    wrong = [name for name, tokens in found.items() if tokens != wanted]
    alone = "code of its own" in runner.not_exact_because
    if wrong:
        return Outcome("WRONG", ", ".join(wrong))
    return Outcome("served alone" if alone else "served")


class TooLarge(Exception):
    """A model that is not small, whatever its configuration says."""


def tiny_model(config: Any) -> Any:
    """With random float32 weights, in eval mode. Raises TooLarge, and what transformers raises."""
    models: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in models.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise TooLarge(f"its smallest configuration here has {size} parameters")
    torch.manual_seed(0)
    return models.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


@torch.inference_mode()
def transformers_tokens(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0].tolist()[len(prompt) :]
    return tokens


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line), type(error).__name__)[:160]


def table(facts: dict[str, Any]) -> str:
    """What docs/models.md shows of the outcomes."""
    by_how: dict[str, list[str]] = {}
    for kind, (how, _) in facts["types"].items():
        by_how.setdefault(how, []).append(kind)
    counts = ", ".join(f"{len(kinds)} {how}" for how, kinds in sorted(by_how.items()))
    lines = [
        f"Of {len(facts['types'])} types of transformers {facts['transformers']}: {counts}.",
        "",
    ]
    for how, title in (
        ("served", "Served with the kernels of Baton"),
        ("served alone", "Served by the model's own attention, one sequence after the other"),
    ):
        lines += [f"**{title}:** {', '.join(by_how.get(how, []))}.", ""]
    lines += ["| not served | | why |", "|---|---|---|"]
    lines += [
        f"| {kind} | {how} | {why} |"
        for kind, (how, why) in facts["types"].items()
        if not how.startswith("served")
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="types to try; none tries all")
    chosen = parser.parse_args().types
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    found = {}
    for kind in chosen or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[kind] = outcome(kind)
        print(kind, *found[kind], flush=True)
    facts = {"transformers": transformers.__version__, "types": found}
    if chosen:
        facts["types"] = {**json.loads(FACTS.read_text())["types"], **found}
    FACTS.write_text(json.dumps(facts, indent=1) + "\n")
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + table(facts) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
