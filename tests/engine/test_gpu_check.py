"""The host's side of the GPU check: its arithmetic, its report, and that a part may fail alone.

What it does with a runner is tried on the CPU with small models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gpu_check
from baton.testing.fake_runner import FakeRunner
from baton_loadtest.report import Result
from gpucheck import figures, kernels, parity, speed
from gpucheck.driving import generate
from tests.engine import driving
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import random_prompts


def test_weights_and_kv_of_a_known_model() -> None:
    shape = figures.LLAMA_8B
    # 8.03 billion parameters, of which the embedding table is not read whole in a step.
    assert shape.step_weights + shape.vocab * shape.hidden == pytest.approx(8.03e9, rel=1e-3)
    assert shape.kv_elements * 2 == 131072
    one = figures.decode_bytes(shape, 1, 1000, 2)
    assert one == 2 * shape.step_weights + 131072 * 1000
    assert figures.decode_bytes(shape, 64, 1000, 2) - one == 63 * 131072 * 1000


def test_operations_of_chunks_add_up() -> None:
    shape = figures.Shape(2, 8, 16, 2, 1, 4, 32)
    head = 2 * shape.hidden * shape.vocab
    whole = figures.prefill_flops(shape, 48, 0) - head
    parts = [figures.prefill_flops(shape, 16, first) - head for first in (0, 16, 32)]
    assert sum(parts) == whole
    assert parts[0] < parts[1] < parts[2]


def test_medians_and_agreement() -> None:
    assert figures.median([5.0, 1.0, 2.0]) == 2.0
    assert figures.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert figures.first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert figures.first_difference([1, 2], [1, 2]) is None
    assert figures.agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == (3, 5)


def test_a_runner_is_driven_with_steps_ahead() -> None:
    prompts = random_prompts((5, 21, 40), 2048)
    wanted = driving.generate(FakeRunner(), prompts, driving.together(3, 4), 6)
    assert generate(FakeRunner(depth=2), prompts, 6, chunk=16) == wanted


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_a_part_that_fails_is_told_and_the_others_count(tmp_path: Path) -> None:
    check = gpu_check.Check(quick=True)
    check.attempt("good", lambda check: [Result("speed", 3.0, "B/s", goal=2.0, met=True)])
    assert check.sound
    check.attempt("bad", lambda check: [Result("x", check.ceiling("read bandwidth"), "B/s")])
    check.attempt("after", lambda check: [Result("size", 1.0, "B")])
    gpu_check.report(check, tmp_path / "gpu.json")
    said = json.loads((tmp_path / "gpu.json").read_text())
    assert said["failures"] == {"bad": "RuntimeError: read bandwidth was not measured"}
    names = [result["name"] for result in said["results"]]
    assert names == ["speed", "good took", "bad took", "size", "after took"]
    assert set(said["versions"]) == {"torch", "triton", "transformers"}
    assert not check.sound


def test_a_missed_goal_is_no_success() -> None:
    check = gpu_check.Check(quick=True)
    check.attempt("slow", lambda check: [Result("speed", 1.0, "B/s", goal=2.0, met=False)])
    assert not check.failures and not check.sound


@pytest.mark.deep
def test_tokens_are_held_against_transformers(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "QUICK", ("llama",))
    monkeypatch.setattr(parity, "LENGTHS", (1, 33))
    (found,) = parity.tokens_of_tiny_models("float32", quick=True, device="cpu")
    assert (found.ratio, found.met, found.against) == (1.0, True, 48)
    monkeypatch.setattr(parity, "generate", lambda runner, prompts, new_tokens, chunk: [[0], [0]])
    (found,) = parity.tokens_of_tiny_models("float32", quick=True, device="cpu")
    assert found.met is False


@pytest.mark.parametrize("device", [CUDA, INTERPRETER])
def test_kernels_are_held_against_float64(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernels.Case("small", heads=4, kv_heads=2, size=16, window=20, sinks=True)
    monkeypatch.setattr(kernels, "CASES", (case,))
    monkeypatch.setattr(kernels, "PARTS", ((0, 20), (17, 1), (30, 5)))
    (found,) = kernels.correctness("float32", device)
    assert found.met, found.value


@pytest.mark.deep
def test_a_model_is_made_without_files() -> None:
    shape = figures.Shape(2, 64, 128, 4, 2, 16, 256)
    runner = speed.open_model(shape, 2, 256, 96, device="cpu")
    texts = generate(runner, random_prompts((5, 30), 256), 4)
    assert [len(text) for text in texts] == [4, 4]
    runner.close()
