"""The form a weight gets, that no timing changes bits, and what is left where weights were."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from batonlm.engine.linear import Bound, Chooser, PackedLinear, loosen, swap
from tests.engine.tiny_models import build

CUTS = ((0, 0), (0, 1), (3, 5), (40, 33), (100, 200))


def bound(layer: nn.Module) -> Bound:
    assert isinstance(layer, PackedLinear)
    return layer.products[0]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(70, 33), (64, 64), (256, 768), (70, 2048), (900, 768)]
)
@torch.inference_mode()
def test_exact_layers_give_the_same_bits_for_any_rows(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    own = nn.Linear(inputs, outputs)
    network = nn.Sequential(own)
    swap(network, exact=True)
    x = torch.randn(1, 700, inputs)
    whole = network(x)
    assert whole.shape == (1, 700, outputs)
    torch.testing.assert_close(whole, own(x), rtol=1e-4, atol=1e-4)
    for start, count in CUTS:
        assert torch.equal(network(x[:, start : start + count]), whole[:, start : start + count])


@pytest.mark.parametrize("exact", [True, False])
@torch.inference_mode()
def test_any_layer_stays_the_same_function(exact: bool) -> None:
    torch.manual_seed(0)
    conv: nn.Module = Conv1D(60, 90)  # type: ignore[no-untyped-call]
    nn.init.normal_(conv.get_parameter("bias"))
    own = [nn.Linear(90, 60), nn.Linear(90, 60, bias=False), conv]
    x = torch.randn(9, 90)
    wanted = [layer(x) for layer in own]
    network = nn.ModuleList(own)
    swap(network, exact=exact)
    for layer, before in zip(network, wanted, strict=True):
        assert isinstance(layer, PackedLinear)
        assert layer.weight.is_meta
        assert (layer.weight.dtype, layer.weight.shape) == (torch.float32, (60, 90))
        torch.testing.assert_close(layer(x), before)
        assert layer(x[:0]).shape == (0, 60)


class Clock:
    """Gives random readings, so that any form may look fastest."""

    def __init__(self, seed: int):
        self._numbers = random.Random(seed)

    def __call__(self) -> float:
        return self._numbers.random()


@pytest.mark.deep
@torch.inference_mode()
def test_no_timing_changes_bits() -> None:
    """Two workers that measure differently must agree, or migrated sequences would change."""
    torch.manual_seed(0)
    shapes = [(64, 64), (256, 128), (300, 200), (256, 768), (900, 700)]
    weights = [torch.randn(shape) for shape in shapes]
    x = torch.randn(40, 1000)
    wanted: list[torch.Tensor] = []
    for seed in range(6):
        chooser = Chooser(exact=True, clock=Clock(seed))
        products = [chooser.bind(weight, None) for weight in weights]
        got = [
            product(x[start : start + count, : product.inputs])
            for product in products
            for start, count in ((0, 40), (0, 1), (7, 3), (20, 17))
        ]
        wanted = wanted or got
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_the_fastest_form_is_taken() -> None:
    weight = torch.randn(64, 64)
    forms = set()
    for seed in range(12):
        forms.add(Chooser(exact=False, clock=Clock(seed)).bind(weight, None).choice.form.name)
    assert len(forms) > 1


def test_a_shape_is_chosen_for_once(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    with caplog.at_level(logging.DEBUG, "batonlm.engine"):
        swap(network, exact=True)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("weights 64 x 64") for line in lines) == 1
    assert sum(line.startswith("weights 32 x 64") for line in lines) == 1
    assert sum(line.startswith("weights: ") for line in lines) == 1
    assert bound(network[0]).choice is bound(network[1]).choice


def test_large_weights_of_a_worker_for_one_sequence_stay_as_they_are() -> None:
    weight = torch.randn(1000, 600)
    assert Chooser(exact=False, max_batch=1).bind(weight, None).choice.form.name == "plain"
    few = Chooser(exact=True, max_batch=1).bind(weight, None).choice.form
    assert few is Chooser(exact=True).bind(weight, None).choice.form


def test_logits_are_proven_for_a_batch_only() -> None:
    network = build("llama")
    swap(network, exact=True, max_batch=40)
    sizes = bound(network.lm_head).choice.sizes
    assert sizes is not None
    assert max(sizes) <= 40
    inner = bound(network.model.layers[0].mlp.up_proj).choice.sizes
    assert inner is not None
    assert max(inner) > 40


@torch.inference_mode()
def test_loosened_layers_compute_any_rows_at_once() -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    swap(network, exact=True)
    network.append(nn.Linear(64, 8))
    before = network(torch.ones(3, 64))
    loosen(network)
    assert isinstance(network[2], PackedLinear)
    assert all(bound(layer).choice.sizes is None for layer in network)
    torch.testing.assert_close(network(torch.ones(3, 64)), before)


@pytest.mark.deep
@pytest.mark.parametrize("threads", [2, 3])
@torch.inference_mode()
def test_bits_hold_for_several_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for outputs, inputs in ((64, 64), (256, 768), (900, 700)):
        chooser = Chooser(exact=True)
        layers.append(chooser.bind(torch.randn(outputs, inputs), torch.randn(outputs)))
    x = torch.randn(130, 768)
    for layer, inputs in zip(layers, (64, 768, 700), strict=True):
        rows = x[:, :inputs].contiguous()
        whole = layer(rows)
        for start, count in ((0, 1), (3, 5), (40, 33)):
            assert torch.equal(layer(rows[start : start + count]), whole[start : start + count])
