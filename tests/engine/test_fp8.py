"""fp8 linear layers: what they are defined to be, near to float32, refused where there are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.graphs import refusing_host_waits
from batonlm.engine.linear import FP8, PackedLinear, swap
from batonlm.engine.quantized import fits, quantize_rows_fp8, settle
from batonlm.engine.runner import TorchRunner
from tests.engine.bundled import BUNDLED, conversation
from tests.engine.driving import GREEDY


def rows(count: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_its_numbers_and_scales(
    count: int, dtype: torch.dtype, *, with_bias: bool
) -> None:
    weight, given = rows(48, 64, 1).to(dtype), (rows(count, 64, 2) * 30).to(dtype)
    bias = rows(1, 48, 3)[0].to(dtype) if with_bias else None
    (left, by_row), (right, by_output) = quantize_rows_fp8(given), quantize_rows_fp8(weight)
    wanted = (left.double() @ right.double().t()) * by_row * by_output.t()
    if bias is not None:
        wanted += bias
    got = FP8.bind(weight, bias)(given[None])
    assert got.shape == (1, count, 48)
    assert got.dtype == dtype
    # Rounded to the dtype twice, by the product and by the bias.
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(
        got[0].double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
    )


def test_rows_are_near_to_what_they_stand_for() -> None:
    """Three bits of mantissa: to a sixteenth at most, but for what is small beside the largest."""
    given = rows(20, 256, 4)
    given[3] = 0
    given[4] *= 1e-20
    numbers, scales = quantize_rows_fp8(given)
    back = numbers.float() * scales
    largest = given.abs().amax(1, keepdim=True)
    assert bool(((back - given).abs() <= given.abs() / 16 + largest * 2e-5).all())


def test_what_is_no_number_shows_in_its_row_alone() -> None:
    weight, given = rows(32, 32, 5), rows(4, 32, 6)
    product = FP8.bind(weight, None)
    wanted = product(given)
    given[1, 7], given[2, 3] = torch.nan, torch.inf
    got = product(given)
    assert bool(got[1:3].isnan().all())
    assert torch.equal(got[[0, 3]], wanted[[0, 3]])


def test_no_rows_make_no_rows_and_no_product_makes_the_host_wait() -> None:
    product = FP8.bind(rows(32, 32, 5), None)
    assert product(torch.empty(0, 32)).shape == (0, 32)
    with torch.inference_mode(), refusing_host_waits():
        product(rows(3, 32, 7))


def test_only_layers_that_a_gpu_takes_are_quantized() -> None:
    assert fits(torch.empty(16, 64), "fp8")
    assert not fits(torch.empty(24, 64), "fp8")
    assert not fits(torch.empty(64, 40), "fp8")
    assert not fits(torch.empty(16, 4096), "fp8")
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)).requires_grad_(False)
    given = rows(5, 64, 8)
    wanted = network(given)
    swap(network, exact=False, quantize="fp8")
    forms = [
        layer.products[0].choice.form.name for layer in network if isinstance(layer, PackedLinear)
    ]
    assert forms[0] == "fp8"
    assert forms[1] != "fp8"
    assert float((network(given) - wanted).norm() / wanted.norm()) < 0.08


def test_a_trained_model_hardly_notices() -> None:
    def load(quantize: str) -> TorchRunner:
        return TorchRunner.load(EngineConfig(str(BUNDLED), num_blocks=40, quantize=quantize))

    plain, small = load("none"), load("fp8")
    assert small.model.digest == f"{plain.model.digest}-fp8"
    assert "fp8" in small.not_exact_because
    text = conversation(160)
    same, distances = 0, []
    for end in range(8, len(text), 8):
        row = (SampleRow(0, 0, 0, GREEDY),)
        plan = StepPlan(0, (Chunk(0, text[:end], 0, ((0, 20),), row),))
        one, other = (runner.forward(plan)[0].clone() for runner in (plain, small))
        distances.append(float((other - one).norm() / one.norm()))
        same += int(one.argmax() == other.argmax())
    plain.close()
    small.close()
    assert max(distances) < 0.2
    assert same >= 0.8 * len(distances)


def test_it_is_refused_where_there_are_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    settle("fp8", torch.device("cpu"), torch.float32)
    with pytest.raises(InvalidArgument, match="bfloat16") as raised:
        settle("fp8", gpu, torch.float16)
    assert raised.value.field == "quantize"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InvalidArgument, match=r"8\.9"):
        settle("fp8", gpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settle("fp8", gpu, torch.bfloat16)
