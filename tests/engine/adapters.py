"""Writes LoRA adapters as peft saves them, and adds them to a model of transformers as peft does.

`tests/clients/test_peft.py` holds both against peft itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.engine.tiny_models import build
from tests.greedy import greedy_tokens

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "mixtral": ATTENTION,
    "gpt_oss": ATTENTION,
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "lfm2": ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "jamba": (*ATTENTION, "in_proj", "x_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
}
"""Of architectures whose layers have other names than ALL, or adapters for some of them only."""


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features


def linear_layers(network: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """By name, those whose names end with a target."""
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and name.rpartition(".")[2] in targets
    }


def save_adapter(
    arch: str,
    folder: Path,
    *,
    rank: int = 8,
    seed: int = 1,
    targets: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Random matrices that change most tokens. targets: none are the architecture's own. settings:
    of adapter_config.json."""
    targets = targets or TARGETS.get(arch, ALL)
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    for name, layer in linear_layers(build(arch), targets).items():
        inputs, outputs = _sizes(layer)
        own = int(settings.get("rank_pattern", {}).get(name, rank))
        for part, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            matrix = torch.randn(shape, generator=generator) * 0.3 / math.sqrt(own)
            stored[f"base_model.model.{name}.lora_{part}.weight"] = matrix.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": arch,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": arch == "gpt2",
        "inference_mode": True,
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapted(network: nn.Module, folder: Path) -> nn.Module:
    """The network, from whose layers comes what peft's unmerged layers give."""
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    for name in {key.rpartition(".lora_")[0] for key in stored}:
        down, up = (stored[f"{name}.lora_{part}.weight"].float() for part in "AB")
        own = name.removeprefix("base_model.model.")
        alpha = config.get("alpha_pattern", {}).get(own, config["lora_alpha"])
        rank = len(down)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

        def add(
            _layer: nn.Module,
            given: tuple[torch.Tensor, ...],
            output: torch.Tensor,
            down: torch.Tensor = down,
            up: torch.Tensor = up,
            scale: float = scale,
        ) -> torch.Tensor:
            return output + (given[0] @ down.T @ up.T) * scale

        network.get_submodule(own).register_forward_hook(add)
    return network


def expected(
    arch: str, adapter: Path | None, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """The greedy tokens that transformers generates."""
    network: Any = build(arch)
    if adapter is not None:
        adapted(network, adapter)
    return [greedy_tokens(network, prompt, count) for prompt in prompts]


@torch.inference_mode()
def wrong_tokens(network: Any, answers: Sequence[tuple[list[int], list[int]]]) -> list[str]:
    """What a network says against greedy answers to prompts; empty where each token is the one that
    it finds most likely behind those before it. One pass computes all of them: a causal network
    reads nothing of the padding behind a sequence."""
    longest = max(len(prompt) + len(tokens) for prompt, tokens in answers)
    rows = [[*prompt, *tokens] for prompt, tokens in answers]
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    best = network(input_ids=ids).logits.argmax(-1).tolist()
    return [
        f"{prompt} -> {tokens}, not {right}"
        for (prompt, tokens), row in zip(answers, best, strict=True)
        if (right := row[len(prompt) - 1 : len(prompt) + len(tokens) - 1]) != tokens
    ]
