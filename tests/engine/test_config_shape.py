"""A model's sizes from its config.json alone are those of the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batonlm.core.request.model import KV_DTYPES
from batonlm.engine.config import EngineConfig
from batonlm.engine.config_shape import ConfigShape, shape_of
from tests.engine.tiny_models import ARCHS, LATENT, REFUSED, STATES

KNOWN = (
    *("cohere", "gemma2", "gemma3", "glm4", "granite", "llama", "llama_tied", "ministral"),
    *("mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
)
BUFFERS_BYTES = 4096
"""Rotary frequencies and the like, which the formula leaves out."""


def config_of(arch: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes a model's config.json, and returns it."""
    config = {**ARCHS, **LATENT, **STATES, **REFUSED}[arch]()
    for name, value in changes.items():
        setattr(config, name, value)
    config.architectures = None
    config.save_pretrained(folder)
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return read


@pytest.mark.deep
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        *((arch, {}) for arch in KNOWN),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("mistral", {"head_dim": None}),
    ],
    ids=str,
)
def test_it_is_the_models(arch: str, changes: dict[str, Any], device: str, tmp_path: Path) -> None:
    from batonlm.engine.footprint import activation_bytes, foresee, weights_bytes

    shape = shape_of(config_of(arch, tmp_path, **changes))
    assert isinstance(shape, ConfigShape)
    on_cpu = device == "cpu"
    for dtype, quantize in (
        *(("float32", "none"), ("bfloat16", "none")),
        *((("float32", "int8"), ("bfloat16", "int4")) if on_cpu else ()),
    ):
        config = EngineConfig(
            str(tmp_path), dtype=dtype, quantize=quantize, device=device, kv_memory_bytes=0
        )
        built = foresee(config, 1 << 40)
        model, made = built.model, built.shape
        own = weights_bytes(model.network, model.device, model.quantize)
        found = shape.weights_bytes(dtype, model.quantize, on_cpu=on_cpu)
        assert 0 <= own - found < BUFFERS_BYTES
        assert shape.activation_bytes(config, dtype) == activation_bytes(config, model, made)
        assert shape.position_bytes(dtype) * config.block_size == built.memory.block_bytes
        assert made.layout.num_layers == shape.layers
        assert (made.layout.key_size, made.layout.value_size) == (shape.head_size,) * 2
        assert made.sliding_layers == shape.sliding_layers
        assert model.description.max_model_len == shape.positions


@pytest.mark.parametrize("arch", sorted((ARCHS | LATENT | STATES | REFUSED).keys() - set(KNOWN)))
def test_others_are_left_to_the_model(arch: str, tmp_path: Path) -> None:
    assert shape_of(config_of(arch, tmp_path)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_size": None},
        {"num_key_value_heads": "2"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"layer_types": ["linear_attention"]},
        {"model_type": "unheard-of"},
    ],
    ids=str,
)
def test_what_makes_another_model_of_it_is_not_guessed(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = config_of("llama", tmp_path)
    assert shape_of(settings) is not None
    assert shape_of(settings | changes) is None


def test_kv_of_another_type_is_counted() -> None:
    settings = {
        "model_type": "llama",
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    shape = shape_of(settings)
    assert shape is not None
    assert shape.position_bytes("float32") == 2 * 4 * 2 * 16 * 4
    assert shape.position_bytes(KV_DTYPES["int8"]) == 2 * 4 * 2 * (16 + 1)
