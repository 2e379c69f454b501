"""Products in proven sizes, functions without tails, and what happens when nothing is proven."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from batonlm.engine.exact import (
    NotExact,
    confine,
    cuts,
    in_tiles,
    prove,
    random_rows,
    tiled,
    without_tails,
)
from batonlm.engine.linear import swap

CPU = torch.device("cpu")


@given(rows=st.integers(0, 600), sizes=st.frozensets(st.sampled_from([1, 2, 8, 48, 256])))
@settings(max_examples=40)
def test_only_proven_sizes_are_computed(rows: int, sizes: frozenset[int]) -> None:
    proven = sizes | {16}
    seen = set()
    weight = torch.randn(5, 3)

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x @ weight.t()

    x = torch.randn(rows, 3)
    torch.testing.assert_close(tiled(product, x, proven), x @ weight.t())
    assert seen <= proven


def test_rows_are_cut_where_padding_would_cost_more() -> None:
    sizes = frozenset((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    assert cuts(9, sizes) == (16,)
    assert cuts(130, sizes) == (128, 2)
    assert cuts(300, sizes) == (256, 64)
    assert cuts(2048, sizes) == (512,) * 4
    assert cuts(3, frozenset((16,))) == (16,)
    assert cuts(100, frozenset((16,))) == (16,) * 7


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (1000, 256), (256, 768), (7, 33)])
def test_proven_sizes_give_the_same_bits(outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs)
    tried = random_rows(inputs, torch.float32, CPU)

    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    sizes = prove(product, tried, in_tiles(product, tried))
    x = torch.randn(300, inputs)
    whole = tiled(product, x, sizes)
    for start, count in ((0, 1), (3, 5), (40, 33), (100, 200)):
        some = tiled(product, x[start : start + count], sizes)
        assert torch.equal(some, whole[start : start + count])


def test_rare_differences_of_half_precision_are_found() -> None:
    """One output in ten thousand, which a look at a few rows would miss."""

    def product(x: torch.Tensor) -> torch.Tensor:
        rare = (x[:, :1] * 1e4).round().remainder(10_000) == 17
        return torch.where(rare & torch.tensor(len(x) == 24), -x, x)

    rows = random_rows(40, torch.bfloat16, CPU)
    rows[300, 0] = 0.0017
    expected = in_tiles(product, rows)
    assert 24 not in prove(product, rows, expected)
    assert {16, 32} <= prove(product, rows, expected)


def test_a_product_that_depends_on_its_neighbours_is_not_exact() -> None:
    rows = random_rows(8, torch.float32, CPU)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    with pytest.raises(NotExact, match="depend on their place"):
        prove(product, rows, in_tiles(product, rows))


class Gated(nn.Module):
    """Bare parameters, a function with tails, and a linear layer, as experts and gates have."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 72, 33))
        self.out = nn.Linear(33, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = torch.sigmoid(x @ self.experts[0]) * F.silu(x @ self.experts[1])
        mixed: torch.Tensor = self.out(gated)
        return mixed


@torch.inference_mode()
def test_a_confined_module_gives_the_same_bits_for_any_rows() -> None:
    torch.manual_seed(0)
    network = Gated()
    x = torch.randn(300, 72)
    before = network(x)
    swap(network, exact=True)
    confine(network, lambda: network(x[:20]))
    whole = network(x)
    torch.testing.assert_close(whole, before)
    for start, count in ((0, 1), (1, 2), (5, 31), (200, 100)):
        assert torch.equal(network(x[start : start + count]), whole[start : start + count])


class Mean(nn.Module):
    """Its product has no exact form: the matrix itself is taken from the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch.full((1, x.shape[1]), torch.nan))


def test_a_network_that_cannot_be_exact_is_left_as_it_was() -> None:
    network = nn.Sequential(Mean())
    with pytest.raises(NotExact):
        confine(network, lambda: network(torch.ones(3, 4)))
    assert "forward" not in network[0].__dict__
    assert network(torch.ones(3, 4)).isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("function", [torch.sigmoid, F.silu, F.gelu, F.softplus, F.mish])
def test_no_tails(function: object, threads: int) -> None:
    torch.set_num_threads(threads)
    assert callable(function)
    x = torch.randn(150_000) * 3
    whole = without_tails(function, x)
    torch.testing.assert_close(whole, function(x))
    for start, count in ((0, 1), (5, 31), (100, 33_000), (70, 65_537), (1, 100_001)):
        some = without_tails(function, x[start : start + count])
        assert torch.equal(some, whole[start : start + count])
