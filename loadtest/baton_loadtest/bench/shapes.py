"""The models that benchmarks run: random weights in known shapes, built once; loads no torch."""

from __future__ import annotations

import json
import os
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

from baton.cli.layout import resolve_model
from baton_loadtest.bench.process import call, say

MAX_POSITIONS = 16384
BUILD_DEADLINE_S = 300.0

_COMMON: dict[str, Any] = {
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}

_SMALL: dict[str, Any] = {
    **_COMMON,
    "config": "LlamaConfig",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**_SMALL, "vocab_size": 512},
    "wide": {**_SMALL, "vocab_size": 131072},
    "8m": {
        **_COMMON,
        "config": "LlamaConfig",
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "25m": {
        **_COMMON,
        "config": "LlamaConfig",
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "100m": {
        **_COMMON,
        "config": "LlamaConfig",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "500m": {
        **_COMMON,
        "config": "Qwen3Config",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""What a transformers config class of that name is made with."""


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def folder(shape: str) -> Path:
    """The model's folder: one of SHAPES, built if it has to be, or any model's folder or hub id.

    Raises InvalidArgument when there is no such model.
    """
    settings = SHAPES.get(shape)
    if settings is None:
        return resolve_model(shape)[0]
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    target = cache() / f"{shape}-{digest}"
    if not (target / "model.safetensors").is_file():
        say(f"building {shape} in {target}")
        job = {"settings": settings, "target": str(target)}
        call("build", job, threads=1, deadline_s=BUILD_DEADLINE_S)
    return target


def with_tokenizer(model: Path, folder: Path) -> Path:
    """A model's folder; one of random weights borrows the bundled model's tokenizer, in a folder
    that is empty."""
    if (model / "tokenizer.json").is_file():
        return model
    bundled = resolve_model("")[0]
    borrowed = [bundled / name for name in TOKENIZER_FILES]
    for file in (*model.iterdir(), *(file for file in borrowed if file.is_file())):
        (folder / file.name).symlink_to(file)
    return folder


def cache() -> Path:
    """Where built models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "baton", "bench")


def config(model: Path) -> dict[str, Any]:
    """A model's config.json."""
    read: dict[str, Any] = json.loads((model / "config.json").read_text())
    return read


def kv_bytes(settings: dict[str, Any]) -> int:
    """Bytes of float32 KV that one position takes in all layers."""
    heads = settings["num_attention_heads"]
    size = settings.get("head_dim") or settings["hidden_size"] // heads
    kv_heads = settings.get("num_key_value_heads") or heads
    return int(2 * 4 * settings["num_hidden_layers"] * kv_heads * size)


def weights_read(model: Path, settings: dict[str, Any]) -> int:
    """How many weights a step of one token reads: all, but of an embedding of its own one row.

    Reads the headers of the safetensors files only. Knows dense models.
    """
    total = 0
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        for name, tensor in header.items():
            own = not settings.get("tie_word_embeddings", False)
            if name == "__metadata__" or (own and name.endswith("embed_tokens.weight")):
                continue
            count = 1
            for length in tensor["shape"]:
                count *= length
            total += count
    return total
