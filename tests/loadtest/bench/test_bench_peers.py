"""A model is written as one GGUF file, under llama.cpp's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton_loadtest.bench.engines import SHAPES
from baton_loadtest.bench.peers import write_gguf

gguf: Any = pytest.importorskip("gguf")

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of the tiny shape, with a few of its tensors."""
    config = {**SHAPES["tiny"], "model_type": "llama", "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_tensors_are_written_under_llama_cpps_names(model: Path) -> None:
    weights = {
        "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
        "model.norm.weight": torch.ones(3),
        Q_PROJ: torch.arange(64.0).view(64, 1),
    }
    save_file(weights, model / "model.safetensors")
    write_gguf(model, model / "float16.gguf")
    found = {one.name: one.data for one in gguf.GGUFReader(model / "float16.gguf").tensors}
    assert set(found) == {"token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight"}
    assert found["token_embd.weight"].tolist() == weights["model.embed_tokens.weight"].tolist()
    # Of a head of 16, the two halves are interleaved.
    assert found["blk.1.attn_q.weight"].flatten()[:4].tolist() == [0, 8, 1, 9]


def test_what_has_no_place_is_refused(model: Path) -> None:
    save_file({"model.layers.0.nonsense.weight": torch.ones(1)}, model / "a.safetensors")
    with pytest.raises(ValueError, match="has no place"):
        write_gguf(model, model / "float16.gguf")
