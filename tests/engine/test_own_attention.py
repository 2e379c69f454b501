"""Models that attend by code of their own give the tokens that transformers generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import fill, generate, packed, random_prompts, scattered, together
from tests.engine.test_parity import expected
from tests.engine.tiny_models import OWN, VOCAB

LENGTHS = (1, 5, 16, 17, 24, 33, 50, 70)
BLOCKS = 6
NEW_TOKENS = 6
PREFIX = 20


@pytest.mark.parametrize("arch", OWN)
def test_tokens_equal_transformers(arch: str, saved: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = expected(arch, prompts, NEW_TOKENS)
    config = EngineConfig(str(saved(arch)), num_blocks=BLOCKS * len(prompts))
    runner, other = TorchRunner.load(config), TorchRunner.load(config)
    one, apart = together(len(prompts), BLOCKS), scattered(len(prompts), BLOCKS)
    assert "code of its own" in runner.not_exact_because
    assert generate(runner, prompts, one, NEW_TOKENS) == wanted
    assert generate(runner, prompts, apart, NEW_TOKENS, chunk=7) == wanted
    for prompt, here, there in zip(prompts, one, apart, strict=True):
        if count := min(PREFIX, len(prompt) - 1):
            fill(runner, prompt[:count], here)
            other.unpack(there, 0, count, memoryview(packed(runner, here, 0, count)))
    assert generate(other, prompts, apart, NEW_TOKENS, start=PREFIX) == wanted


def test_memory_is_foreseen(saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved("gemma4")), num_blocks=64)
    foreseen, runner = foresee(config), TorchRunner.load(config)
    assert foreseen.memory.block_bytes == runner.memory.block_bytes
    assert foreseen.shape.layout.bytes_per_position == runner.layout.bytes_per_position


@pytest.mark.parametrize(
    ("field", "value"),
    [("quantize", "int8"), ("kv_cache_dtype", "int8"), ("kv_wire_dtype", "int8")],
)
def test_what_it_cannot_be_served_with(
    field: str, value: str, saved: Callable[[str], Path]
) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(InvalidArgument) as caught:
        TorchRunner.load(EngineConfig(str(saved("bloom")), num_blocks=64, **options))
    assert caught.value.field == field
