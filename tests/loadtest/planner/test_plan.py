"""`baton plan memory` says what a worker would take, or why it would not start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batonlm.cli import layout, precision
from batonlm.cli.layout import UpOptions, plan, resolve_model
from batonlm.cli.main import main
from batonlm.cli.precision import FLOAT32, read_weights
from batonlm.core.errors import InvalidArgument
from batonlm.engine.config import MIB, EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.gpus import Gpu
from tests.loadtest.planner.model_configs import LLAMA_8B, LLAMA_70B, LLAMA_405B

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which only the configuration is there."""
    folder = tmp_path_factory.mktemp("large") / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def test_a_large_model_is_planned_from_its_configuration_alone(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures" / "plan.json"
    told = ("--device", "cuda", "--memory-gib", "80", "--context", "8192", "--json", str(file))
    assert main(["plan", "memory", "--model", str(large), *told]) == 0
    found = json.loads(file.read_text())
    parameters = 128256 * 4096 * 2 + 32 * (4096 * (4096 * 2 + 1024 * 2 + 14336 * 3) + 2 * 4096)
    assert abs(found["weights_bytes"] - 2 * (parameters + 4096)) < MIB
    assert found["wire_bytes_per_token"] == 2 * 32 * 8 * 256
    assert found["block_bytes"] == 16 * 131072
    assert found["sequence_bytes"] == 8192 * 131072
    taken = found["weights_bytes"] + found["activation_bytes"] + found["kv_bytes"]
    assert 0 <= 0.9 * 80 * 2**30 - taken < found["block_bytes"]
    assert found["sequences"] == found["num_blocks"] // 512 > 40
    said = capsys.readouterr().out
    assert "a token's KV 128 KiB" in said and "of 8192 takes 1 GiB" in said
    assert f"in {found['num_blocks']} blocks of 16 positions" in said


def test_deepseeks_latents_take_70_kb_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the 5 MB that keys and values of 128 heads would."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    file = tmp_path / "plan.json"
    told = ("--device", "cuda", "--memory-gib", "1600", "--context", "4096", "--json", str(file))
    assert main(["plan", "memory", "--model", str(tmp_path), *told]) == 0
    found = json.loads(file.read_text())
    assert found["wire_bytes_per_token"] == 61 * (512 + 64) * 2 == 70272
    assert found["block_bytes"] == 16 * 70272
    assert (
        "68.6 KiB: 61 layers x (a latent of 512 + a rotated key of 64)" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("settings", "gib", "tensor", "stages", "least", "most"),
    [
        (LLAMA_70B, 80, 4, 1, 32.5, 33.5),
        pytest.param(LLAMA_405B, 141, 8, 1, 94, 95.5, marks=pytest.mark.deep),
        pytest.param(LLAMA_405B, 80, 8, 2, 47, 48.5, marks=pytest.mark.deep),
    ],
)
def test_a_rank_is_planned_as_its_part_of_the_model(
    settings: dict[str, Any],
    gib: int,
    tensor: int,
    stages: int,
    least: float,
    most: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GiB of a rank's weights lie between least and most."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    file = tmp_path / "plan.json"
    told = ("--device", "cuda", "--memory-gib", str(gib), "--json", str(file), "--context", "8192")
    ranks = ("--tensor-parallel", str(tensor), "--pipeline-parallel", str(stages))
    assert main(["plan", "memory", "--model", str(tmp_path), *told, *ranks]) == 0
    found = json.loads(file.read_text())
    assert least < found["weights_bytes"] / 2**30 < most
    layers = -(-settings["num_hidden_layers"] // stages)
    assert found["block_bytes"] == 16 * layers * 2 * (8 // tensor) * 128 * 2
    assert found["weights_bytes"] + found["kv_bytes"] < 0.9 * gib * 2**30
    assert f"{tensor * stages} ({tensor} of a stage x {stages} stages)" in capsys.readouterr().out
    if stages == 1:
        return
    assert main(["plan", "memory", "--model", str(tmp_path), *told, *ranks[:2]]) == 1
    assert "the pool would hold 0 positions" in capsys.readouterr().err


def test_a_degree_that_does_not_split_is_refused(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ("--memory-gib", "80", "--tensor-parallel", "3")
    assert main(["plan", "memory", "--model", str(large), *told]) == 1
    assert "num_attention_heads 32 is no multiple of 3 (tensor_parallel)" in capsys.readouterr().err


def test_quantizing_takes_less(large: Path) -> None:
    plain, small = (
        foresee(EngineConfig(str(large), quantize=name, device="cpu"), 1 << 40).memory
        for name in ("none", "int8")
    )
    assert plain.weights_bytes / 3 > small.weights_bytes > plain.weights_bytes / 4


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("--memory-gib", "20"), "(memory_share)"),
        (("--memory-gib", "50", "--context", "131072"), "takes 32768 MiB of KV"),
        (("--memory-gib", "0"), "(memory_gib)"),
        (("--memory-share", "2"), "(memory_share)"),
        (("--context", "999999"), "more than the model's 131072"),
        (("--sequences", "0"), "(max_batch)"),
    ],
)
def test_what_would_not_start_is_said_in_a_line(
    large: Path, told: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "memory", "--model", str(large), "--device", "cpu", *told]) == 1
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_needs_its_memory_said(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "memory", "--model", str(large), "--device", "cuda"]) == 1
    assert "no GPU here" in capsys.readouterr().err


def test_windows_and_padding_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**LLAMA_8B, "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert main(["plan", "memory", "--model", str(tmp_path), "--memory-gib", "40"]) == 0
    assert "5 layers look back over a window only" in capsys.readouterr().out


def shared_out(**options: Any) -> list[tuple[str, ...]]:
    """The memory flags of every engine process."""
    found = []
    for spec in plan(UpOptions(**options)).processes:
        if spec.role in ("prefill", "decode"):
            command = spec.command
            at = [
                i for i, word in enumerate(command) if word in ("--kv-memory-mib", "--memory-share")
            ]
            found.append(tuple(word for i in at for word in command[i : i + 2]))
    return found


def test_engines_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "usable_gpus", lambda device: [])
    monkeypatch.setattr(precision, "host_free_bytes", lambda: 1000 * MIB)
    bundled, _ = resolve_model("")
    weights = read_weights(bundled).num_bytes(FLOAT32)
    each = (400 * MIB - weights) // MIB
    assert shared_out() == [("--kv-memory-mib", str(each))] * 2
    assert shared_out(kv_memory_mib=7) == [("--kv-memory-mib", "7")] * 2
    monkeypatch.setattr(precision, "host_free_bytes", lambda: 30 * MIB)
    with pytest.raises(InvalidArgument) as caught:
        shared_out(decode=2)
    assert caught.value.field == "model" and "3 engine processes" in caught.value.message
    gpus = [Gpu(i, f"GPU-{i}", "L4", 24 << 30, 23 << 30) for i in range(2)]
    monkeypatch.setattr(layout, "usable_gpus", lambda device: gpus)
    assert shared_out(decode=1) == [()] * 2, "each has a GPU of its own, and its default"
    assert shared_out(decode=2) == [("--memory-share", "0.450")] * 3


def test_a_broken_weight_file_is_left_to_the_workers(tmp_path: Path) -> None:
    for name, data in {"a": b"", "b": b"\xff" * 20, "c": b"\x02" + bytes(7) + b"[]"}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    assert read_weights(tmp_path).count == 0
