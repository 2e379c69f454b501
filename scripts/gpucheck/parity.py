"""Tokens of a runner against transformers' own on the same GPU."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from baton.engine.config import EngineConfig
from baton.engine.runner import TorchRunner
from baton_loadtest.report import Result, compared
from gpucheck.driving import generate
from gpucheck.figures import agreement
from tests.engine.tiny_models import ARCHS, VOCAB, build, save_tiny_model

LENGTHS = (1, 7, 16, 33, 64, 130)
QUICK = ("llama", "qwen3", "gemma2", "gpt_oss", "mistral")


def tokens_of_tiny_models(kind: str, quick: bool, device: str = "cuda") -> list[Result]:
    """One figure per architecture: the share of tokens before the first that differs."""
    found = []
    for arch in QUICK if quick else ARCHS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found.append(_one(arch, kind, Path(folder) / arch, device))
            except Exception as error:
                # One architecture's failure must not hide the others'.
                print(f"parity of {arch} in {kind} failed: {error!r}", flush=True)
                found.append(compared(f"parity, {kind}, {arch}", 0.0, "tokens", 1.0, _goal(kind)))
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _one(arch: str, kind: str, folder: Path, device: str) -> Result:
    numbers = random.Random(3)
    prompts = [[numbers.randrange(4, VOCAB) for _ in range(length)] for length in LENGTHS]
    new_tokens = 24
    save_tiny_model(arch, folder)
    config = EngineConfig(
        str(folder), device=device, dtype=kind, num_blocks=128, max_model_len=256, max_batch=8
    )
    runner = TorchRunner.load(config)
    try:
        got = generate(runner, prompts, new_tokens, chunk=50)
    finally:
        runner.close()
    model = build(arch).to(device=device, dtype=getattr(torch, kind))
    wanted = [_alone(model, prompt, new_tokens) for prompt in prompts]
    alike, of = agreement(got, wanted)
    return compared(f"parity, {kind}, {arch}", alike, "tokens", of, _goal(kind))


def _goal(kind: str) -> float | None:
    """Exact tokens are promised in float32 only."""
    return 1.0 if kind == "float32" else None


@torch.inference_mode()
def _alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens of the model's own eager attention, recomputing everything each time."""
    text = list(prompt)
    for _ in range(new_tokens):
        ids = torch.tensor([text], device=model.device)
        text.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
