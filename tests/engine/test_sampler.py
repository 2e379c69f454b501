"""Filters and penalties against transformers' own, and draws against their distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from baton.core.request.request import SamplingParams
from baton.engine.sampler import distances, draw, head, keep, penalize, weigh

VOCAB = 1200


def logits(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def kept(rows: torch.Tensor, **settings: float) -> torch.Tensor:
    """Weights of rows [n, vocab] under the same settings for each."""
    temperature = column(*[settings.pop("temperature", 1.0)] * len(rows))
    filters = {name: column(*[value] * len(rows)) for name, value in settings.items()}
    return keep(distances(rows, temperature.float()), **filters)


@pytest.mark.parametrize("rows", [1, 3])
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
def test_filters_keep_what_transformers_keeps(
    settings: dict[str, Any], seed: int, rows: int
) -> None:
    """One row takes another way than several do: both must be right."""
    params = SamplingParams(**settings)
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    scores = torch.stack([logits(seed + i) for i in range(rows)])
    warped = scores
    for warper in warpers:
        warped = warper(torch.zeros(rows, 1, dtype=torch.int64), warped)
    weights = kept(scores, **settings)
    wanted = torch.softmax(warped, 1)
    assert torch.equal(weights > 0, wanted > 0)
    share = (weights / weights.sum(1, keepdim=True)).float()
    torch.testing.assert_close(share, wanted, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_head_is_the_shortest_start_of_the_sorted_tokens(seed: int) -> None:
    """Against a sort, with many ties; one row by itself against the same row among others."""
    numbers = torch.Generator().manual_seed(seed)
    distance = torch.randint(0, 40, (4, 500), generator=numbers) / 7.0
    distance[3] = 0.0
    amounts = weigh(distance)
    for limit in (column(1, 7, 250, 499), amounts.sum(1, keepdim=True) * 0.37):
        counted = amounts if limit[0] > 1 else torch.ones_like(amounts)
        got = head(distance, counted, limit)
        order = torch.sort(distance, dim=1, stable=True).indices
        ranked = counted.gather(1, order)
        before = ranked.cumsum(1) - ranked
        wanted = torch.zeros_like(got).scatter_(1, order, before < limit)
        assert torch.equal(got, wanted)
        alone = [head(distance[i : i + 1], counted[i : i + 1], limit[i : i + 1]) for i in range(4)]
        assert torch.equal(torch.cat(alone), wanted)


def test_weights_are_whole_and_their_sums_exact() -> None:
    weights = weigh(distances(torch.stack([logits(), torch.zeros(VOCAB)]), column(1, 1).float()))
    assert torch.equal(weights, weights.round())
    assert weights.sum(1).max() <= 2**52
    forward, backward = weights.cumsum(1)[:, -1], weights.flip(1).cumsum(1)[:, -1]
    assert torch.equal(forward, backward)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_transformers_own(penalty: float) -> None:
    history = [5, 9, 9, 700, 1199]
    scores = logits()[None]
    processor: Any = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    wanted = processor(torch.tensor([history]), scores.clone())
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, history] = True
    none = torch.zeros(1, 1)
    used = torch.zeros(1, VOCAB)
    got = penalize(scores, seen, used, torch.tensor([[penalty]]), none, none)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_presence_counts_once_and_frequency_every_time() -> None:
    scores = logits()[None]
    used = torch.zeros(1, VOCAB)
    used[0, 7], used[0, 8] = 2.0, 1.0
    one = torch.ones(1, 1)
    got = penalize(scores, used > 0, used, one, one * 0.5, one * 0.25)
    wanted = scores.clone()
    wanted[0, 7] -= 0.5 + 2 * 0.25
    wanted[0, 8] -= 0.5 + 0.25
    torch.testing.assert_close(got, wanted)


def test_equal_logits_are_cut_by_id() -> None:
    weights = kept(torch.zeros(2, 1000), top_k=3)
    assert weights.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert set(weights.flatten().tolist()) == {0.0, 2.0**42}


def test_draws_take_every_kept_token_in_its_share() -> None:
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    numbers = [0.0, 0.74999, 0.75, 1 - 2**-53]
    drawn = draw(weights.expand(4, -1).contiguous(), column(*numbers))
    assert drawn.tolist() == [1, 1, 3, 3]
