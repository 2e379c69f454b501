"""Tokens of a runner against transformers' own, of tiny models on the same device."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from baton_loadtest.report import Result, compared
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from gpucheck.check import Check
from gpucheck.driving import generate
from gpucheck.figures import agreement
from tests.engine.tiny_models import VOCAB, build, save_tiny_model

LENGTHS = (1, 7, 16, 33, 64, 130)
NEW_TOKENS = 24


def float32(check: Check) -> Iterator[Result]:
    """The share of tokens before the first that differs; the part names the architecture. Exact
    tokens are promised in this number type only."""
    yield _agreement(check, "float32", 1.0)


def bfloat16(check: Check) -> Iterator[Result]:
    """A rehearsal computes float32, which is all that Triton's interpreter multiplies."""
    yield _agreement(check, "bfloat16" if check.on_gpu else "float32", None)


def _agreement(check: Check, kind: str, goal: float | None) -> Result:
    lengths, new_tokens = (LENGTHS, NEW_TOKENS) if check.on_gpu else ((5,), 2)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(4, VOCAB) for _ in range(length)] for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(check.part, Path(folder) / check.part)
        config = EngineConfig(
            str(path),
            device=check.device,
            dtype=kind,
            attention="auto" if check.on_gpu else "triton",
            exact=False,
            num_blocks=128,
            max_model_len=256,
            max_batch=8,
        )
        runner = TorchRunner.load(config)
        try:
            got = generate(runner, prompts, new_tokens, chunk=50)
        finally:
            runner.close()
    model = build(check.part).to(device=check.device, dtype=getattr(torch, kind))
    wanted = [_alone(model, prompt, new_tokens) for prompt in prompts]
    alike, of = agreement(got, wanted)
    return compared(f"parity, {kind}, {check.part}", alike, "tokens", of, goal)


@torch.inference_mode()
def _alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens of the model's own eager attention, recomputing everything each time."""
    text = list(prompt)
    for _ in range(new_tokens):
        ids = torch.tensor([text], device=model.device)
        text.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
