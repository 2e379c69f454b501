"""Models that would answer wrongly, or cannot be read, are refused by name before serving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import StepPlan
from batonlm.engine import loader, selfcheck
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import together
from tests.engine.tiny_models import REFUSED, save_tiny_model


def refusal(folder: Path, **options: Any) -> str:
    """The message with which the model is refused."""
    with pytest.raises(UnsupportedModel) as caught:
        TorchRunner.load(EngineConfig(str(folder), num_blocks=64, **options))
    assert caught.value.field == "model"
    assert str(folder.parent) not in caught.value.message
    return caught.value.message


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("arch", "why"), [("moshi", "moshi: layer 0 attends to all positions and keeps 24")]
)
def test_architectures_that_fail_silently(arch: str, why: str, tmp_path: Path) -> None:
    assert why in refusal(save_tiny_model(arch, tmp_path / arch))


def test_a_step_that_transformers_computes_otherwise_than_a_chunk(tmp_path: Path) -> None:
    folder = save_tiny_model("nemotron_h", tmp_path / "m", time_step_min=0.5)
    assert "give other logits" in refusal(folder)


def test_windows_that_transformers_does_not_keep(tmp_path: Path) -> None:
    folder = save_tiny_model("mistral", tmp_path / "m", sliding_window=1)
    assert "windows of one position" in refusal(folder)


def test_every_refused_architecture_is_tested() -> None:
    assert set(REFUSED) == {"moshi"}


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert "neither a folder nor a hub id" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "neither a folder nor a hub id" in refusal(tmp_path / "file")


def test_a_folder_without_what_it_needs(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "no safetensors weights" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickled weights only" in refusal(tmp_path)


def test_an_unknown_architecture(tmp_path: Path, saved: Callable[[str], Path]) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    change_config(folder, model_type="no_such_model")
    assert "architecture" in refusal(folder)
    change_config(folder, model_type="t5")
    assert "t5" in refusal(folder)


@pytest.mark.parametrize("heads", ["many", 0])
def test_a_configuration_that_transformers_refuses(heads: object, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    change_config(folder, num_attention_heads=heads)
    assert "values that transformers" in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("musicgen", "musicgen: several of its parts are models of text"),
        ("gemma3n", "gemma3n: transformers makes it with a package only"),
        ("dbrx", "cannot make a causal language model of its configuration"),
    ],
)
def test_types_of_which_transformers_makes_no_model(kind: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert why in refusal(tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        loader.outline(EngineConfig(str(tmp_path), num_blocks=64))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("gpt2", {"n_head": 5}),
        ("llama", {"pad_token_id": 50000}),
        ("llama", {"hidden_size": -4}),
    ],
)
def test_shapes_of_which_there_is_no_model(
    kind: str, wrong: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved(kind), tmp_path / "m"))
    change_config(folder, **wrong)
    why = "cannot make a causal language model of its configuration"
    assert why in refusal(folder)
    with pytest.raises(UnsupportedModel, match=why):
        loader.outline(EngineConfig(str(folder), num_blocks=64))


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_corrupt_weights(damage: str, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(
        {"cut": content[:-100], "header": b"\xff" * 64 + content[64:], "empty": b""}[damage]
    )
    assert "model.safetensors are corrupt or cut short" in refusal(folder)


def test_missing_weights(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    shards = {"a": "model.safetensors", "b": "model-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert "model-00002.safetensors" in refusal(folder)


def test_lengths_beyond_which_rotary_frequencies_vary(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 1.0,
        "factor": 8.0,
    }
    folder = save_tiny_model(
        "phi3", tmp_path / "m", rope_parameters=rope, original_max_position_embeddings=256
    )
    assert "rotary" in refusal(folder, max_model_len=257)
    runner = TorchRunner.load(EngineConfig(str(folder), num_blocks=64))
    assert runner.model.max_model_len == 256


def test_a_length_beyond_the_model(saved: Callable[[str], Path]) -> None:
    assert "2048" in refusal(saved("llama"), max_model_len=4096)


def test_a_pool_too_small_names_its_field(saved: Callable[[str], Path]) -> None:
    for field, value in (("num_blocks", 2), ("kv_memory_bytes", 99)):
        options: dict[str, Any] = {field: value}
        with pytest.raises(InvalidArgument) as caught:
            TorchRunner.load(EngineConfig(str(saved("llama")), **options))
        assert caught.value.field == field


class Twice(nn.Module):
    """Stands where an attention layer's forward was and runs it twice."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.attention(*args, **kwargs)
        return self.attention(*args, **kwargs)


def test_attention_must_be_called_once_a_layer(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loader.wire

    def wire(network: Any) -> None:
        original(network)
        layer = network.model.layers[1]
        layer.self_attn = Twice(layer.self_attn)

    monkeypatch.setattr(loader, "wire", wire)
    assert "layer 1 is computed more than once a step" in refusal(saved("llama"))


def test_other_logits_than_the_models_own_are_refused() -> None:
    def forward(plan: StepPlan) -> torch.Tensor:
        return torch.zeros(len(plan.chunks), 10)

    texts = selfcheck.prompts(10, 100)
    right, wrong = torch.zeros(45, 10), torch.ones(45, 10)
    tables = together(2, 3)
    selfcheck.SelfCheck(forward, tables, texts, [right, right[:22]]).parity()
    with pytest.raises(UnsupportedModel, match="packed prompts give other logits"):
        selfcheck.SelfCheck(forward, tables, texts, [right, wrong[:22]]).parity()
    with pytest.raises(UnsupportedModel, match="tokens one by one give other logits"):
        selfcheck.SelfCheck(forward, tables, texts, [wrong, right[:22]]).decode()
    with pytest.raises(InvalidArgument, match="no numbers in float32"):
        selfcheck.SelfCheck(forward, tables, texts, [right, wrong[:22] * torch.nan]).parity()
