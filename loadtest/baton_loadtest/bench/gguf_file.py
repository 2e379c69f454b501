"""Writes a model folder of the Llama or Qwen 3 shape as one GGUF file for llama.cpp.

Imports no more than numpy and gguf, so that the interpreter that has llama.cpp can run it. The
tokenizer in the file is a made-up one: only token ids are ever used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write(model: Path, target: Path) -> None:
    """Matrices as float16, the rest as float32. Raises ValueError for other architectures."""
    import gguf
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"no GGUF writer for {kind}")
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, kind)
    writer.add_name(model.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    interleaved = {"attn_q": heads, "attn_k": kv_heads} if kind == "llama" else {}
    for name, values in _tensors(model):
        if name == "output.weight" and config.get("tie_word_embeddings"):
            continue
        pairs = interleaved.get(name.split(".")[-2])
        if pairs:
            # llama.cpp rotates neighbours, transformers the two halves of a head.
            halves = values.reshape(pairs, 2, -1, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored = np.float16 if values.ndim == 2 else np.float32
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)


def _rope_base(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or config
    return float(rope.get("rope_theta", 10000.0))


def _tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """llama.cpp's names with float32 arrays, from float32 safetensors files."""
    import numpy as np

    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] != "F32":
                raise ValueError(f"{name} is {tensor['dtype']}; only float32 is converted")
            begin, end = tensor["data_offsets"]
            count = (end - begin) // 4
            values = np.memmap(file, "<f4", "r", offset=8 + size + begin, shape=(count,))
            yield _name(name), values.reshape(tensor["shape"])


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, _, index, rest = stem.split(".", 3)
    if rest not in LAYER:
        raise ValueError(f"{name} has no place in a GGUF file of this shape")
    return f"blk.{index}.{LAYER[rest]}.{kind}"
