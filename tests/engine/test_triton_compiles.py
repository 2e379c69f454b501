"""The kernels compile for GPUs and fit them, which needs no GPU to see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batonlm

pytest.importorskip("triton")

# What one program may have of a multiprocessor's shared memory, by compute capability.
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
# Bytes of stack by thread: a few registers may spill, a shape that is too large spills thousands.
SPILLED = 96

MODELS = [
    # dtype, query heads per KV head, key size, value size, window, soft cap, latent, what KV is
    # kept in
    ("bf16", 4, 128, 128, 0, 0.0, False, "bf16"),
    ("bf16", 8, 64, 64, 128, 0.0, False, "bf16"),
    ("bf16", 2, 256, 256, 4096, 50.0, False, "bf16"),
    ("bf16", 1, 192, 128, 0, 0.0, False, "bf16"),
    ("fp16", 3, 80, 80, 0, 0.0, False, "fp16"),
    ("fp32", 4, 128, 128, 0, 0.0, False, "fp32"),
    ("fp32", 2, 256, 256, 0, 0.0, False, "fp32"),
    ("fp32", 16, 576, 512, 0, 0.0, True, "fp32"),
    ("fp16", 40, 288, 256, 0, 0.0, True, "fp16"),
    ("bf16", 128, 576, 512, 0, 0.0, True, "bf16"),
    ("bf16", 4, 128, 128, 0, 0.0, False, "u8"),
    ("bf16", 4, 128, 128, 0, 0.0, False, "i8"),
    ("bf16", 8, 64, 64, 128, 0.0, False, "i8"),
    ("bf16", 2, 256, 256, 4096, 50.0, False, "u8"),
    ("fp16", 3, 80, 80, 0, 0.0, False, "i8"),
]


def compile_for(capability: int, model: tuple[Any, ...], cache: Path) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = str(Path(batonlm.__path__[0]).parent)
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("compiling.py")),
            *map(str, (capability, SHARED_BYTES[capability], *model)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def check(capability: int, model: tuple[Any, ...], cache: Path) -> None:
    report = compile_for(capability, model, cache)
    for kernel, taken in report.items():
        assert taken["shared"] <= SHARED_BYTES[capability], kernel
        assert taken["stack"] <= (0 if kernel.startswith("adapters'") else SPILLED), kernel
    # Where bits must be equal, so must the instructions be.
    assert report["exact prefill"]["instructions"] == report["decode"]["instructions"]
    if model[0] != "fp32":
        if not model[6]:
            for kind in ("down", "up"):
                ways = [report[f"adapters' {kind}, few, {how}"] for how in ("apart", "together")]
                assert [way["instructions"] for way in ways] == [["mma.sync"]] * 2
        # Tiles over latents have too few rows for a Hopper's wide products.
        wide = "wgmma" if capability == 90 and not model[6] else "mma.sync"
        assert report["prefill"]["instructions"] == [wide]
        assert report["decode"]["instructions"] == ["mma.sync"]


@pytest.mark.deep
@pytest.mark.parametrize("model", [MODELS[0], MODELS[9], MODELS[11]], ids=str)
def test_they_fit_a_hopper(model: tuple[Any, ...], tmp_path: Path) -> None:
    check(90, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_they_fit_for_all_shapes(capability: int, model: tuple[Any, ...], tmp_path: Path) -> None:
    check(capability, model, tmp_path)
