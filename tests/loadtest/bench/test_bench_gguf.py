"""A model's tensors find their places in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton_loadtest.bench import gguf_file


def test_tensors_are_read_under_llama_cpps_names(tmp_path: Path) -> None:
    weights = {
        "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
        "model.layers.1.self_attn.q_proj.weight": torch.ones(2, 3),
    }
    save_file(weights, tmp_path / "model.safetensors")
    found = dict(gguf_file._tensors(tmp_path))
    assert set(found) == {"token_embd.weight", "blk.1.attn_q.weight"}
    assert found["token_embd.weight"].tolist() == weights["model.embed_tokens.weight"].tolist()


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.experts.up.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="has no place"):
        list(gguf_file._tensors(tmp_path))


def test_only_float32_is_converted(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(1).half()}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="only float32"):
        list(gguf_file._tensors(tmp_path))
