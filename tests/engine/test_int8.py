"""int8 linear layers: right, the same for any neighbours, near to float32, refused if unsound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.attention.interface import ForwardPass
from batonlm.engine.config import EngineConfig
from batonlm.engine.exact import Product
from batonlm.engine.linear import INT8, swap
from batonlm.engine.loader import run_network
from batonlm.engine.quantized import fewest_rows, fits, quantize_rows, settle
from batonlm.engine.runner import TorchRunner
from tests.engine.bundled import BUNDLED, conversation
from tests.engine.driving import GREEDY, generate, random_prompts, scattered, together
from tests.engine.machine import needs_int8
from tests.engine.tiny_models import VOCAB, build

NEW = 12
CPU = torch.device("cpu")

pytestmark = needs_int8


def load(folder: Path, quantize: str = "int8") -> TorchRunner:
    return TorchRunner.load(EngineConfig(str(folder), num_blocks=200, quantize=quantize))


class Dequantized(nn.Module):
    """What an int8 layer means, in float: rounded weights times activations rounded by row."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        integers, scales = quantize_rows(weight)
        self.weight = integers * scales
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        integers, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
        rows = (integers * scales).view(x.shape)
        return nn.functional.linear(rows, self.weight, self.bias)


def dequantize(network: nn.Module) -> nn.Module:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Dequantized(child.weight.detach(), child.bias))
            elif type(child) is Conv1D:
                setattr(parent, name, Dequantized(child.weight.detach().t(), child.bias))
    return network


@given(st.integers(1, 40), st.integers(1, 60), st.floats(1e-20, 1e20), st.integers(0, 1000))
@settings(max_examples=50)
def test_rows_are_rounded_by_at_most_half_a_level(
    count: int, inputs: int, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, inputs, generator=generator) * size
    integers, scales = quantize_rows(rows)
    assert integers.dtype == torch.int8
    assert int(integers.abs().max()) <= 127
    assert bool(((integers * scales - rows).abs() <= 0.5001 * scales).all())


@torch.inference_mode()
def test_empty_rows_stay_empty_and_wrong_numbers_stay_visible() -> None:
    product = INT8.bind(torch.randn(20, 30), None)
    rows = torch.randn(4, 30)
    rows[1] = 0
    rows[2, 7] = torch.nan
    rows[3, 9] = torch.inf
    output = product(rows)
    assert output[0].isfinite().all()
    assert (output[1] == 0).all()
    assert output[2:].isnan().all()
    assert torch.equal(output[0], product(rows[:1])[0])


@pytest.mark.deep
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (256, 768), (70, 333), (2048, 256)])
@torch.inference_mode()
def test_a_row_does_not_change_with_its_neighbours(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    own = nn.Linear(inputs, outputs)
    weight, bias = own.weight.detach(), own.bias.detach()
    network = nn.Sequential(own)
    swap(network, exact=True, quantize="int8")
    x = torch.randn(300, inputs) * torch.logspace(-3, 3, 300)[:, None]
    whole = network(x)
    integers, scales = quantize_rows(x)
    by_output, weight_scales = quantize_rows(weight)
    sums = (integers.double() @ by_output.double().t()).float()
    torch.testing.assert_close(whole, sums * weight_scales[:, 0] * scales + bias)
    for start, count in ((0, 0), (0, 1), (3, 2), (5, 31), (100, 200)):
        assert torch.equal(network(x[start : start + count]), whole[start : start + count])


@pytest.mark.deep
@pytest.mark.parametrize("arch", ["llama", "gpt2", "opt"])
@torch.inference_mode()
def test_tokens_are_those_of_the_dequantized_model(arch: str, saved: Callable[[str], Path]) -> None:
    reference = dequantize(build(arch))
    prompts = random_prompts([3, 40, 17], VOCAB)
    wanted = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(_last_logits(reference, text).argmax()))
        wanted.append(text[len(prompt) :])
    runner = load(saved(arch))
    assert runner.exact, runner.not_exact_because
    for chunk, tables in ((10_000, together(3, 5)), (7, scattered(3, 5))):
        assert generate(runner, prompts, tables, NEW, chunk=chunk) == wanted
    assert generate(runner, prompts[1:2], together(1, 5), NEW) == wanted[1:2]
    expected = _last_logits(reference, prompts[1])
    got = _runner_logits(runner, prompts[1])
    assert _distance(got, expected) < 0.01


@pytest.mark.deep
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_bits_do_not_depend_on_chunks_or_neighbours(
    arch: str, saved: Callable[[str], Path]
) -> None:
    runner = load(saved(arch))
    assert runner.exact, runner.not_exact_because
    text, *others = random_prompts([50, 1, 9, 33], VOCAB)
    alone = _runner_logits(runner, text)
    row = (SampleRow(0, 0, 0, GREEDY),)
    around = [Chunk(i, other, 0, ((20 * i, 4),), row) for i, other in enumerate(others, 1)]
    for start in (49, 31, 16):
        runner.forward(StepPlan(0, (Chunk(0, text[:start], 0, ((0, 4),)), *around)))
        ours = Chunk(0, text[start:], start, ((0, 4),), row)
        assert torch.equal(runner.forward(StepPlan(1, (*around, ours)))[-1], alone)


@pytest.mark.deep
def test_a_trained_model_hardly_notices() -> None:
    """On random weights int8 decides nothing: on trained ones its error is two percent."""
    plain, small = load(BUNDLED, "none"), load(BUNDLED)
    text = conversation(160)
    distances, same = [], 0
    for end in range(16, len(text), 24):
        one, other = _runner_logits(plain, text[:end]), _runner_logits(small, text[:end])
        distances.append(_distance(other, one))
        same += int(one.argmax() == other.argmax())
    assert max(distances) < 0.1
    assert same >= 0.9 * len(distances)


@pytest.mark.deep
def test_workers_that_differ_in_quantization_do_not_meet(saved: Callable[[str], Path]) -> None:
    plain, small = load(saved("llama"), "none"), load(saved("llama"))
    assert small.model.digest == f"{plain.model.digest}-int8"
    assert "-int8 against" in small.layout.difference(plain.layout)
    assert not small.layout.difference(load(saved("llama")).layout)


def test_narrow_layers_stay_as_they_are() -> None:
    assert fits(torch.empty(128, 1024), "int8")
    assert not fits(torch.empty(64, 1024), "int8")
    network = nn.Sequential(nn.Linear(1024, 4))
    x = torch.randn(5, 1024)
    before = network(x)
    swap(network, exact=True, quantize="int8")
    torch.testing.assert_close(network(x), before, rtol=1e-4, atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_activations(dtype: str, saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved("llama")), num_blocks=64, quantize="int8", dtype=dtype)
    runner = TorchRunner.load(config)
    text = random_prompts([30], VOCAB)[0]
    assert _distance(_runner_logits(runner, text), _runner_logits(load(saved("llama")), text)) < 0.2


def test_hardware_that_lacks_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="on cuda there is fp8") as caught:
        settle("int8", torch.device("cuda"), torch.bfloat16)
    assert caught.value.field == "quantize"


def test_sums_that_overflow_are_refused() -> None:
    """As on CPUs that add two products in 16 bits."""

    def saturating(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        right = INT8.bind(weight, bias)
        return lambda rows: right(rows).clamp(max=3.0)

    with pytest.raises(InvalidArgument, match="wrong") as caught:
        fewest_rows(saturating, torch.randn(64, 64), None)
    assert caught.value.field == "quantize"


def _last_logits(network: nn.Module, text: list[int]) -> torch.Tensor:
    positions = torch.arange(len(text))[None]
    return run_network(
        network, ForwardPass(torch.tensor([text]), positions, positions[0, -1:], None)
    )[0]


def _runner_logits(runner: TorchRunner, text: list[int]) -> torch.Tensor:
    row = (SampleRow(0, 0, 0, GREEDY),)
    blocks = -(-len(text) // runner.block_size)
    return runner.forward(StepPlan(0, (Chunk(0, text, 0, ((0, blocks),), row),)))[0].float()


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of what is wanted."""
    return float((got - wanted).norm() / wanted.norm())
