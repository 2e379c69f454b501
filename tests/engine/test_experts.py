"""Packed experts against the loop of transformers: layouts, neighbours, and what is left."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import use_experts_implementation

from batonlm.engine.exact import confine
from batonlm.engine.linear import Chooser, PackedExperts, are_known_experts, loosen, swap
from batonlm.engine.ranks.shards import SharedExperts
from tests.engine.machine import needs_int8
from tests.engine.tiny_models import build

ARCHS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
HIDDEN, CHOICES = 64, 2


def experts_of(arch: str) -> Any:
    network = build(arch)
    network.set_experts_implementation("eager")
    found = [module for module in network.modules() if are_known_experts(module)]
    return found[-1].requires_grad_(False)


def routed(tokens: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    scores = torch.randn(tokens, experts, generator=generator)
    weights, index = scores.softmax(-1).topk(CHOICES)
    return hidden, index, weights


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("exact", [True, False])
@torch.inference_mode()
def test_they_compute_what_the_loop_does(arch: str, exact: bool) -> None:
    own = experts_of(arch)
    packed = PackedExperts(copy.deepcopy(own), Chooser(exact=exact))
    count = own.down_proj.shape[0]
    for tokens in (1, 2, 40):
        inputs = routed(tokens, count, seed=tokens)
        torch.testing.assert_close(packed(*inputs), own(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", ["none", pytest.param("int8", marks=needs_int8)])
@pytest.mark.parametrize("arch", ARCHS)
@torch.inference_mode()
def test_a_token_does_not_change_with_what_others_choose(arch: str, quantize: str) -> None:
    network = nn.Sequential(experts_of(arch))
    count = network[0].get_parameter("down_proj").shape[0]
    swap(network, exact=True, quantize=quantize)
    inputs = routed(90, count)
    confine(network, lambda: network[0](*inputs))
    whole = network[0](*inputs)
    for start, tokens in ((0, 1), (7, 1), (3, 5), (20, 64)):
        some = [part[start : start + tokens] for part in inputs]
        assert torch.equal(network[0](*some), whole[start : start + tokens])


@pytest.mark.parametrize("form", ["eager", "grouped_mm", "packed"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_ranks_add_up_whatever_the_form_of_their_experts(arch: str, form: str) -> None:
    """Transformers' forms read memory that they did not write for experts that are not there."""
    own = experts_of(arch)
    count = own.down_proj.shape[0]
    hidden, index, weights = routed(9, count)
    wanted = own(hidden, index, weights)
    group: Any = SimpleNamespace(sum=lambda part: part)
    total = torch.zeros_like(wanted)
    half = count // 2
    torch.use_deterministic_algorithms(True)
    try:
        for first in (0, half):
            part = copy.deepcopy(own)
            part.num_experts = half
            for name, weight in own.named_parameters():
                setattr(part, name, nn.Parameter(weight[first : first + half].clone(), False))
            part.config._experts_implementation = "eager" if form == "packed" else form
            made = PackedExperts(part, Chooser(exact=False)) if form == "packed" else part
            total += SharedExperts(made, first, half, group)(hidden, index, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


@needs_int8
@pytest.mark.parametrize("arch", ARCHS)
def test_int8_experts_are_near(arch: str) -> None:
    own = experts_of(arch)
    packed = PackedExperts(copy.deepcopy(own), Chooser(exact=True, quantize="int8"))
    assert {product.choice.form.name for product in packed.products} == {"int8"}
    inputs = routed(20, own.down_proj.shape[0])
    wanted = own(*inputs)
    assert float((packed(*inputs) - wanted).norm() / wanted.norm()) < 0.1


@torch.inference_mode()
def test_no_second_copy_is_left() -> None:
    network = build("qwen3_moe")
    tokens = torch.arange(9)[None]
    before = network(tokens).logits
    swap(network, exact=True)
    assert not [name for name, _ in network.named_parameters() if "experts" in name]
    loosen(network)
    torch.testing.assert_close(network(tokens).logits, before, rtol=1e-3, atol=1e-3)


class _Experts(nn.Module):
    """Experts without a gate, as a loop over tokens."""

    def __init__(self, config: Any):
        super().__init__()
        self.num_experts, self.hidden_dim = 4, HIDDEN
        self.up_proj = nn.Parameter(torch.randn(4, 32, HIDDEN) / 8)
        self.down_proj = nn.Parameter(torch.randn(4, HIDDEN, 32) / 8)
        self.act_fn = nn.SiLU()

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        for token, choices, shares in zip(hidden, index.tolist(), weights, strict=True):
            outputs = [
                F.linear(self.act_fn(F.linear(token, self.up_proj[e])), self.down_proj[e])
                for e in choices
            ]
            rows.append(sum(s * out for s, out in zip(shares, outputs, strict=True)))
        return torch.stack(rows)


@torch.inference_mode()
def test_experts_without_a_gate() -> None:
    torch.manual_seed(0)
    kind: Any = use_experts_implementation(has_gate=False)(_Experts)
    own = kind(SimpleNamespace(_experts_implementation="eager")).requires_grad_(False)
    inputs = routed(9, 4)
    wanted = own(*inputs)
    assert are_known_experts(own)
    torch.testing.assert_close(PackedExperts(own, Chooser(exact=True))(*inputs), wanted)


def test_layouts_that_are_not_known_keep_their_loop() -> None:
    own = experts_of("mixtral")
    own.shared_scale = nn.Parameter(torch.ones(1))
    network = nn.Sequential(own)
    swap(network, exact=False)
    assert network[0] is own
    assert not are_known_experts(nn.Linear(3, 3))
