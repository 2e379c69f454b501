"""Runners that are all held to one contract, small and of the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from batonlm.core.scheduler.plan import (
    Chunk,
    ModelRunner,
    SampledToken,
    SampleRow,
    StepPlan,
    StepResult,
)
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from batonlm.testing.fake_runner import FakeRunner
from tests.engine.driving import random_prompts

BLOCKS = 64
SWAP_BLOCKS = (5, 6)
POISON = 999
LENGTHS = (1, 16, 21, 40)
MakeRunner = Callable[[], ModelRunner]

LLAMA_BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""layers x (keys, values) x heads x positions x elements x bytes"""


def poisoned(folder: Path) -> TorchRunner:
    """A runner whose logits are not numbers after one token."""
    host, disk = (count * LLAMA_BLOCK_BYTES for count in SWAP_BLOCKS)
    runner = TorchRunner.load(
        EngineConfig(str(folder), num_blocks=BLOCKS, swap_host_bytes=host, swap_disk_bytes=disk)
    )
    modules = runner._network.modules()
    embedding = next(module for module in modules if isinstance(module, nn.Embedding))
    with torch.inference_mode():
        embedding.weight[POISON] = torch.nan
    return runner


def open_runner(kind: str, llama: Path) -> ModelRunner:
    """fake: without torch; late: the same with late completion; torch: of a tiny model."""
    if kind == "torch":
        return poisoned(llama)
    return FakeRunner(
        BLOCKS,
        vocab_size=1000,
        poison_token_id=POISON,
        delay_steps=3 if kind == "late" else 0,
        eos_every=5,
        num_swap_blocks=SWAP_BLOCKS,
    )


def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, POISON)


def draw(runner: ModelRunner, chunk: Chunk, row: SampleRow) -> SampledToken:
    runner.submit(StepPlan(7, (chunk._replace(samples=(row,)),)))
    return runner.collect().tokens[0]


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    runner.submit(plan)
    return runner.collect()
