"""Weights in 4 and 8 bits with activations as they are: right, the same for any neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine import quantized
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.linear import INT4, INT8_WEIGHTS, swap
from batonlm.engine.memory import INT4_GROUP, quantized_bytes
from batonlm.engine.quantized import (
    fits,
    quantize_groups,
    quantize_rows,
    settle,
)
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import GREEDY, generate, random_prompts, scattered, together
from tests.engine.tiny_models import VOCAB

CPU = torch.device("cpu")


def rows(count: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def meant(weight: torch.Tensor, form: str) -> torch.Tensor:
    """What a weight stands for when it is rounded."""
    if form == "int8-weights":
        integers, scales = quantize_rows(weight.float())
        return integers.float() * scales.bfloat16().float()
    codes, by_group = quantize_groups(weight)
    grouped = codes.float().view(len(weight), -1, INT4_GROUP) - 8
    scales, offsets = by_group.float().unsqueeze(2).unbind(-1)
    return (grouped * scales + offsets).view(weight.shape)


@pytest.mark.parametrize("form", [INT4, INT8_WEIGHTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (256, 768)])
@torch.inference_mode()
def test_a_product_is_that_of_the_numbers_that_are_kept(
    form: object, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    assert form in (INT4, INT8_WEIGHTS)
    chosen = INT4 if form is INT4 else INT8_WEIGHTS
    weight, bias = rows(outputs, inputs, 1).to(dtype), rows(1, outputs, 2)[0].to(dtype)
    given = rows(21, inputs, 3).to(dtype)
    wanted = given.bfloat16().double() @ meant(weight, chosen.name).double().t() + bias.double()
    got = chosen.bind(weight, bias)(given[None])
    assert got.dtype == dtype
    assert got.shape == (1, 21, outputs)
    error = (got[0].double() - wanted).norm() / wanted.norm()
    assert float(error) < 0.01
    assert chosen.bind(weight, None)(given[:0]).shape == (0, outputs)


def test_groups_are_rounded_by_at_most_half_a_level() -> None:
    weight = rows(32, 128, 4)
    weight[0] = 0
    weight[1] *= 1e-12
    weight[2] += 5
    groups = weight.view(32, -1, INT4_GROUP)
    level = ((groups.amax(-1) - groups.amin(-1)) / 15).clamp_min(1e-30)
    # Scales and offsets are rounded to eight bits themselves.
    allowed = 0.5 * level + groups.abs().amax(-1) * 2**-6
    error = (meant(weight, "int4").view(groups.shape) - groups).abs().amax(-1)
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("form", ["int4", "int8-weights"])
@torch.inference_mode()
def test_a_row_does_not_change_with_its_neighbours(form: str) -> None:
    network = nn.Sequential(nn.Linear(96, 80)).requires_grad_(False)
    swap(network, exact=True, quantize=form)
    given = rows(200, 96, 5)
    whole = network(given)
    for start, count in ((0, 1), (3, 2), (7, 31), (60, 140)):
        assert torch.equal(network(given[start : start + count]), whole[start : start + count])
    given[4, 5] = torch.nan
    again = network(given)
    assert bool(again[4].isnan().all())
    assert torch.equal(again[5:], whole[5:])


def test_what_quantize_comes_down_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs whose 8-bit products overflow, or take for ever, round weights alone."""
    for features, times, wanted in (
        ({"avx512_vnni": True}, 1.5, "int8"),
        ({"avx_vnni": True}, 1.5, "int8"),
        ({"avx512_vnni": True}, 300.0, "int8-weights"),
        ({"avx2": True, "avx512_f": True}, 1.5, "int8-weights"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=features: found)
        monkeypatch.setattr(quantized, "_times_of_float32", lambda found=times: found)
        assert settle("int8", CPU, torch.float32) == wanted
    assert settle("int4", CPU, torch.float32) == "int4"
    assert settle("none", torch.device("cuda"), torch.float16) == "none"
    with pytest.raises(InvalidArgument, match="int4 is for CPUs") as caught:
        settle("int4", torch.device("cuda"), torch.bfloat16)
    assert caught.value.field == "quantize"


def test_layers_that_the_product_does_not_take_stay_as_they_are() -> None:
    assert fits(torch.empty(64, 64), "int4")
    for shape in ((40, 64), (64, 48), (64, 1024)):
        assert not fits(torch.empty(shape), "int4")
    assert quantized_bytes(64, 64, "int4") == 64 * 32 + 64 * 2 * 4


@pytest.mark.parametrize(("arch", "quantize"), [("llama", "int4"), ("qwen3_moe", "int4")])
def test_bits_do_not_depend_on_chunks_or_neighbours(
    arch: str, quantize: str, saved: Callable[[str], Path]
) -> None:
    config = EngineConfig(str(saved(arch)), num_blocks=64, quantize=quantize, device="cpu")
    runner = TorchRunner.load(config)
    assert runner.exact, runner.not_exact_because
    prompts = random_prompts([3, 40, 17], VOCAB)
    wanted = [generate(runner, [prompt], together(1, 5), 8)[0] for prompt in prompts]
    for chunk, tables in ((10_000, together(3, 5)), (7, scattered(3, 5))):
        assert generate(runner, prompts, tables, 8, chunk=chunk) == wanted
    runner.close()


def test_a_cpu_without_vnni_serves_int8_and_meets_no_other(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(saved("llama")), num_blocks=64, quantize="int8", device="cpu")
    plain = TorchRunner.load(EngineConfig(config.model, num_blocks=64, device="cpu"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert (
        foresee(config).memory.weights_bytes
        < foresee(EngineConfig(config.model, num_blocks=64, device="cpu")).memory.weights_bytes
    )
    runner = TorchRunner.load(config)
    assert runner.model.digest == f"{plain.model.digest}-int8-weights"
    assert "-int8-weights against" in runner.layout.difference(plain.layout)
    prompt = random_prompts([30], VOCAB)[0]
    plan = StepPlan(0, (Chunk(0, prompt, 0, ((0, 2),), (SampleRow(0, 0, 0, GREEDY),)),))
    one, other = (each.forward(plan)[0].clone() for each in (plain, runner))
    assert float((other - one).norm() / one.norm()) < 0.1
    plain.close()
    runner.close()
