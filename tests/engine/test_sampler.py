"""Filters and penalties against transformers' own, and draws against their distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from batonlm.core.request.request import SamplingParams
from batonlm.engine.sampler_cpu import draw, keep, likeliest, nearest, penalize, scale_bits, weigh

VOCAB = 1200


def logits(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def distances(row: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    distance: np.ndarray = (row.max() - row).numpy() / np.float32(temperature)
    return distance


def kept(row: torch.Tensor, settings: SamplingParams) -> np.ndarray:
    """The weights of a row's tokens that survive, 0 for the others."""
    distance = distances(row, settings.temperature)
    top_k = settings.top_k if settings.top_k < len(row) else 0
    ids, weights = keep(distance, top_k, settings.top_p, settings.min_p)
    if ids is None:
        return weights
    assert (np.diff(ids) > 0).all()
    whole = np.zeros(len(row))
    whole[ids] = weights
    return whole


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.0001, "temperature": 2.0},
    ],
)
def test_filters_keep_what_transformers_keeps(settings: dict[str, Any], seed: int) -> None:
    params = SamplingParams(**settings)
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    scores = logits(seed)
    warped = scores[None]
    for warper in warpers:
        warped = warper(torch.zeros(1, 1, dtype=torch.int64), warped)
    weights = torch.from_numpy(kept(scores, params))
    wanted = torch.softmax(warped[0], 0)
    assert torch.equal(weights > 0, wanted > 0)
    share = (weights / weights.sum()).float()
    torch.testing.assert_close(share, wanted, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_head_is_the_shortest_start_of_the_sorted_tokens(seed: int) -> None:
    """Against a sort, with many ties."""
    draws = np.random.default_rng(seed)
    for numbers in (draws.integers(0, 40, 500) / 7, np.zeros(500)):
        distance = numbers.astype(np.float32)
        weights = weigh(distance, scale_bits(500))
        order = np.argsort(distance, kind="stable")
        for count in (1, 7, 250, 499):
            assert nearest(distance, count).tolist() == sorted(order[:count])
        ranked = weights[order]
        before = ranked.cumsum() - ranked
        for share in (1e-9, 0.37, 0.9, 1.0):
            limit = share * weights.sum()
            wanted = sorted(order[before < limit])
            assert likeliest(distance, weights, limit).tolist() == wanted


def test_weights_are_whole_and_their_sums_exact() -> None:
    for row in (logits(), torch.zeros(VOCAB)):
        weights = weigh(distances(row), scale_bits(VOCAB))
        assert (weights == weights.round()).all()
        assert weights.sum() <= 2**52
        assert weights.cumsum()[-1] == weights[::-1].cumsum()[-1]


def test_weights_are_probabilities_up_to_rounding() -> None:
    distance = np.linspace(0, 24, 70000, dtype=np.float32)
    bits = scale_bits(128256)
    wanted = np.exp(-distance.astype(np.float64)) * 2.0**bits
    assert (abs(weigh(distance, bits) - wanted) <= 3e-6 * wanted + 1).all()
    edges = np.array([0, 1e30, np.inf], np.float32)
    assert weigh(edges, bits).tolist() == [2.0**bits, 0, 0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_transformers_own(penalty: float) -> None:
    history = [5, 9, 9, 700, 1199]
    scores = logits()[None]
    processor: Any = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    wanted = processor(torch.tensor([history]), scores.clone())
    got = scores[0].numpy()
    penalize(got, np.unique(history), np.zeros(4, np.float32), penalty, 0.0, 0.0)
    assert got.tolist() == wanted[0].tolist()


def test_presence_counts_once_and_frequency_every_time() -> None:
    scores = logits()
    got = scores.clone()
    used = np.array([0, 2, 1], np.float32)
    penalize(got.numpy(), np.array([3, 7, 8]), used, 1.0, 0.5, 0.25)
    scores[7] -= 0.5 + 2 * 0.25
    scores[8] -= 0.5 + 0.25
    torch.testing.assert_close(got, scores)


def test_equal_logits_are_cut_by_id() -> None:
    weights = kept(torch.zeros(1000), SamplingParams(top_k=3))
    assert np.flatnonzero(weights).tolist() == [0, 1, 2]
    assert set(weights.tolist()) == {0.0, 2.0**42}


def test_draws_take_every_kept_token_in_its_share() -> None:
    weights = np.array([0.0, 3.0, 0.0, 1.0, 0.0])
    drawn = [draw(weights, number) for number in (0.0, 0.74999, 0.75, 1 - 2**-53)]
    assert drawn == [1, 1, 3, 3]
    weights = np.tile(weights, 1000)
    assert draw(weights, 0.5) == 2501
