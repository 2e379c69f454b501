"""Multi-head latent attention keeps latents: what is kept of a position, and that nothing else
than the order of sums changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batonlm.engine.config import EngineConfig
from batonlm.engine.latent import LatentProjection
from batonlm.engine.linear import swap
from batonlm.engine.loader import load, wire
from batonlm.engine.runner import TorchRunner
from tests.engine import test_parity
from tests.engine.driving import fill, generate, packed, random_prompts, scattered
from tests.engine.tiny_models import LATENT, VOCAB


def test_queries_and_outputs_take_the_place_of_keys_and_values() -> None:
    """In float64, so that the order of sums does not show."""
    torch.manual_seed(3)
    heads, plain, rotated, latent, value = 5, 6, 4, 7, 3
    linear = torch.nn.Linear(latent, heads * (plain + value), bias=False, dtype=torch.float64)
    projection = LatentProjection(linear, plain, value)
    query = torch.randn(heads, 2, plain + rotated, dtype=torch.float64)
    latents = torch.randn(9, latent, dtype=torch.float64)
    turned = torch.randn(9, rotated, dtype=torch.float64)
    by_head = linear(latents).view(9, heads, plain + value).transpose(0, 1)
    keys = torch.cat((by_head[..., :plain], turned.expand(heads, -1, -1)), -1)
    weights = torch.softmax(query @ keys.transpose(1, 2), -1)
    wanted = weights @ by_head[..., plain:]
    scores = projection.queries(query) @ torch.cat((latents, turned), -1).t()
    torch.testing.assert_close(torch.softmax(scores, -1), weights)
    sums = (weights @ latents).transpose(0, 1)
    torch.testing.assert_close(projection.outputs(sums), wanted.transpose(0, 1))


@pytest.mark.deep
@pytest.mark.parametrize("arch", LATENT)
def test_tokens_of_all_such_models_equal_transformers(
    arch: str, saved: Callable[[str], Path]
) -> None:
    test_parity.check(arch, saved(arch), test_parity.SHORT, 6)


@pytest.mark.parametrize("exact", [True, False])
def test_the_plain_kernel_reads_latents_too(exact: bool, saved: Callable[[str], Path]) -> None:
    """And hands them over to one that has another kernel."""
    prompts = random_prompts((3, 40, 70), VOCAB)
    tables = scattered(3, 6)
    wanted = test_parity.expected("deepseek_v2", prompts, 6)
    plain, fast = (
        TorchRunner.load(
            EngineConfig(str(saved("deepseek_v2")), num_blocks=18, attention=name, exact=exact)
        )
        for name in ("reference", "auto")
    )
    assert generate(plain, prompts, tables, 6, chunk=30) == wanted
    for prompt, table in zip(prompts, tables, strict=True):
        fill(plain, prompt[:-1], table)
        payload = packed(plain, table, 0, len(prompt) - 1)
        fast.unpack(table, 0, len(prompt) - 1, memoryview(payload))
    assert generate(fast, prompts, tables, 6, start=1000) == wanted


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_latents_are_projected_in_the_models_own_type(
    quantize: str, saved: Callable[[str], Path]
) -> None:
    """Where other layers are quantized, bits of the projections are those of the file."""
    folder = saved("deepseek_v3")
    before = load(EngineConfig(str(folder))).network
    after = load(EngineConfig(str(folder))).network
    wire(after)
    swap(after, exact=False, quantize=quantize)
    for layer, own in zip(after.model.layers, before.model.layers, strict=True):  # type: ignore
        projection: Any = layer.self_attn.kv_b_proj
        weight = own.self_attn.kv_b_proj.weight.view(4, 16 + 16, 16)
        assert torch.equal(projection.keys, weight[:, :16].flatten(0, 1))
        assert torch.equal(projection.values, weight[:, 16:].transpose(1, 2).flatten(0, 1))


@pytest.mark.deep
def test_bfloat16_passes_its_checks(saved: Callable[[str], Path]) -> None:
    runner = TorchRunner.load(
        EngineConfig(str(saved("deepseek_v2")), num_blocks=32, dtype="bfloat16")
    )
    assert runner.layout.bytes_per_position == 3 * (24 + 8) * 2
    prompts = random_prompts((20, 33), VOCAB)
    tables = scattered(2, 4)
    wanted = generate(runner, prompts, tables, 5)
    assert not runner.exact or generate(runner, prompts, tables, 5, chunk=7) == wanted
