"""Greedy tokens against transformers' own generate: every one equal, however a prompt is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import fill, generate, packed, random_prompts, scattered, together
from tests.engine.tiny_models import ARCHS, VOCAB, build
from tests.greedy import greedy_tokens

SHORT = (1, 2, 3, 5, 7, 15, 16, 17, 24, 31, 33, 48, 64, 65, 90, 130)
LONG = (1, 2, 5, 16, 17, 33, 64, 90, 130, 200, 255, 256, 257, 400, 513, 600)
PREFIX = 40


def expected(arch: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    network = build(arch)
    return [greedy_tokens(network, prompt, new_tokens) for prompt in prompts]


def check(arch: str, folder: Path, lengths: tuple[int, ...], new_tokens: int) -> None:
    prompts = random_prompts(lengths, VOCAB)
    wanted = expected(arch, prompts, new_tokens)
    blocks = -(-(max(lengths) + new_tokens) // 16)
    one, apart = together(len(prompts), blocks), scattered(len(prompts), blocks)
    for exact in (True, False):
        config = EngineConfig(str(folder), num_blocks=len(prompts) * blocks, exact=exact)
        runner = TorchRunner.load(config)
        assert runner.exact == exact, runner.not_exact_because
        assert generate(runner, prompts, one, new_tokens) == wanted
        assert generate(runner, prompts, apart, new_tokens, chunk=64) == wanted
        assert generate(runner, prompts, apart, new_tokens, chunk=7) == wanted
    other = TorchRunner.load(config)
    for prompt, here, there in zip(prompts, one, apart, strict=True):
        count = min(PREFIX, len(prompt) - 1)
        if count:
            fill(runner, prompt[:count], here)
            other.unpack(there, 0, count, memoryview(packed(runner, here, 0, count)))
    assert generate(other, prompts, apart, new_tokens, start=PREFIX) == wanted


@pytest.mark.parametrize("arch", ARCHS)
def test_tokens_equal_transformers(arch: str, saved: Callable[[str], Path]) -> None:
    check(arch, saved(arch), SHORT, 6)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_long_prompts_equal_transformers(arch: str, saved: Callable[[str], Path]) -> None:
    check(arch, saved(arch), LONG, 32)
