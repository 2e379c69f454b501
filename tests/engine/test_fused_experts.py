"""Triton's mixtures of experts against transformers' loop, and each row against its neighbours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import nn

from batonlm.engine.fused.experts import GroupedExperts, _sort, route, tile_for
from batonlm.engine.fused.kernels import TritonOperators
from batonlm.engine.fused.recipe import Mixture, Recipe
from batonlm.engine.linear import are_known_experts, swap
from batonlm.engine.quantized import quantize_rows_fp8
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.tiny_models import build

ON = pytest.mark.parametrize("device", [INTERPRETER, CUDA])
ARCHS = [pytest.param("mixtral", marks=pytest.mark.deep), "qwen3_moe", "gpt_oss"]
HIDDEN = 64


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that is not written holds what is no number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def experts_of(arch: str, **changes: Any) -> Any:
    """Transformers' module, whose loop is the definition."""
    network = build(arch, **changes)
    network.set_experts_implementation("eager")
    found = [module for module in network.modules() if are_known_experts(module)]
    own = found[-1].requires_grad_(False)
    for name, bias in own.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(bias)
    return own


def grouped(own: Any, *, exact: bool = False) -> nn.Module:
    clamp = (float(own.alpha), float(own.limit)) if hasattr(own, "alpha") else None
    mixture = Mixture(2, True, clamp)
    return TritonOperators(Recipe(16, 2, 1e-5, False, (), (), mixture), exact=exact).experts(
        own, mixture
    )


def routed(
    tokens: int, experts: int, choices: int = 2, seed: int = 0, hidden: int = HIDDEN
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, hidden, generator=generator)
    scores = torch.randn(tokens, experts, generator=generator)
    shares, chosen = scores.softmax(-1).topk(choices)
    return rows, chosen.int(), shares


@ON
@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_weights_in_fp8_are_those_that_their_numbers_stand_for(
    arch: str, device: str, poisoned: None
) -> None:
    own = experts_of(arch)
    made = grouped(copy.deepcopy(own).to(device))
    swap(nn.Sequential(made), exact=False, quantize="fp8")
    kept = [name for name, weight in made.named_parameters() if weight.dtype.itemsize == 1]
    assert len(kept) == 2
    for name in ("gate_up_proj", "down_proj"):
        weight = own.get_parameter(name)
        for expert in weight:
            by_output = expert.t() if own.is_transposed else expert
            numbers, scales = quantize_rows_fp8(by_output)
            by_output.copy_(numbers.float() * scales)
    rows, chosen, shares = routed(5, len(own.down_proj))
    wanted = own(rows, chosen.long(), shares)
    got = made(rows.to(device), chosen.to(device), shares.to(device))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


@ON
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [1, 3, pytest.param(70, marks=pytest.mark.deep)])
@torch.inference_mode()
def test_they_compute_what_the_loop_does(
    arch: str, tokens: int, device: str, poisoned: None
) -> None:
    own = experts_of(arch)
    rows, chosen, shares = routed(tokens, len(own.down_proj), seed=tokens)
    wanted = own(rows, chosen.long(), shares)
    got = grouped(own.to(device))(rows.to(device), chosen.to(device), shares.to(device))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


@ON
@torch.inference_mode()
def test_sizes_need_not_fill_tiles(device: str, poisoned: None) -> None:
    sizes = {"hidden_size": 52, "moe_intermediate_size": 19, "num_experts": 7}
    own = experts_of("qwen3_moe", **sizes)
    for tokens, choices in ((1, 7), (5, 1), (17, 3)):
        rows, chosen, shares = routed(tokens, 7, choices, hidden=52)
        wanted = own(rows, chosen.long(), shares)
        got = grouped(own.to(device))(rows.to(device), chosen.to(device), shares.to(device))
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)
        own.to("cpu")


@ON
@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_in_half_precision_they_are_as_near_as_the_loop(arch: str, device: str) -> None:
    own = experts_of(arch)
    rows, chosen, shares = routed(20, len(own.down_proj))
    wanted = own(rows, chosen.long(), shares)
    half = copy.deepcopy(own).to(device, torch.float16)
    got = grouped(half)(rows.to(device).half(), chosen.to(device), shares.to(device))
    assert got.dtype == torch.float16
    assert float((got.cpu().float() - wanted).norm() / wanted.norm()) < 2e-3


@ON
@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_a_row_keeps_its_bits_whatever_its_neighbours(arch: str, device: str) -> None:
    own = experts_of(arch)
    inputs = [each.to(device) for each in routed(50, len(own.down_proj))]
    experts = grouped(own.to(device), exact=True)
    whole = experts(*inputs)
    for start, tokens in ((0, 1), (7, 1), (3, 5), (9, 41)):
        some = [each[start : start + tokens].contiguous() for each in inputs]
        assert torch.equal(experts(*some), whole[start : start + tokens])


def test_only_exact_mode_keeps_one_tile() -> None:
    few, many = (tile_for(pairs, 8, 2, exact=False) for pairs in (8, 8000))
    assert few != many
    assert {tile_for(pairs, 8, 2, exact=True) for pairs in (8, 8000)} == {few}


@ON
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_what_another_rank_computes_is_skipped(arch: str, device: str, poisoned: None) -> None:
    own = experts_of(arch)
    count = len(own.down_proj)
    rows, chosen, shares = routed(33, count)
    wanted = own(rows, chosen.long(), shares)
    total = torch.zeros_like(wanted)
    half = count // 2
    for first in (0, half):
        part = copy.deepcopy(own)
        for name, weight in own.named_parameters():
            setattr(part, name, nn.Parameter(weight[first : first + half].clone(), False))
        local = chosen - first
        elsewhere = (local < 0) | (local >= half)
        total += grouped(part.to(device))(
            rows.to(device),
            local.masked_fill(elsewhere, half).to(device),
            shares.masked_fill(elsewhere, 0).to(device),
        ).cpu()
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)
    nothing = torch.full((4, 2), half, dtype=torch.int32, device=device)
    none = grouped(part)(rows[:4].to(device), nothing, torch.zeros(4, 2, device=device))
    assert not none.any()


@ON
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("experts", "choices"), [(8, 2), (128, 8), (7, 7), (1, 1)])
def test_routes_are_those_of_a_softmax(
    experts: int, choices: int, normalised: bool, device: str
) -> None:
    logits = torch.randn(9, experts, generator=torch.Generator().manual_seed(3)) * 4
    shares, wanted = logits.softmax(-1).topk(choices)
    if normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    chosen, got = route(logits.to(device), choices, normalised=normalised)
    assert torch.equal(chosen.cpu().long(), wanted)
    torch.testing.assert_close(got.cpu(), shares)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@ON
def test_routes_of_equal_scores_and_of_no_numbers(device: str) -> None:
    logits = torch.zeros(3, 20, device=device)
    logits[1] = torch.nan
    logits[2, 4] = torch.inf
    chosen, shares = route(logits, 3, normalised=True)
    assert chosen[0].tolist() == [0, 1, 2]
    assert shares[0].tolist() == pytest.approx([1 / 3] * 3)
    # They name experts that there are, and poison the row.
    assert chosen[1:].min() >= 0 and chosen[1:].max() < 20
    assert shares[1:].isnan().all()


@ON
@pytest.mark.parametrize("pairs", [1, 1500])
def test_pairs_are_sorted_by_expert(pairs: int, device: str) -> None:
    chosen = torch.randint(0, 6, (pairs,), generator=torch.Generator().manual_seed(pairs))
    order, starts = torch.full((pairs,), -1, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    order, starts = order.to(device), starts.to(device)
    # Expert 5 is another rank's.
    _sort[(6,)](chosen.int().to(device), order, starts, pairs, EXPERTS=5, PAIRS=1024)
    wanted = chosen.argsort(stable=True)[: int((chosen < 5).sum())]
    assert order.cpu()[: len(wanted)].tolist() == wanted.tolist()
    assert (order[len(wanted) :] == -1).all()
    assert starts.tolist() == [int((chosen < expert).sum()) for expert in range(6)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@ON
@torch.inference_mode()
def test_no_number_is_lost_in_a_clamp(device: str) -> None:
    experts = grouped(experts_of("gpt_oss").to(device))
    rows, chosen, shares = (each.to(device) for each in routed(2, 4))
    rows[1, 3] = torch.nan
    got = experts(rows, chosen, shares)
    assert not got[0].isnan().any()
    assert got[1].isnan().all()


def test_the_module_is_not_taken_for_one_that_linear_packs() -> None:
    made = grouped(experts_of("mixtral"))
    assert isinstance(made, GroupedExperts)
    assert not are_known_experts(made)
