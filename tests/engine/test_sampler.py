"""Filters and penalties against transformers' own, and draws against their distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from baton.core.plan import SampleRow
from baton.core.request import SamplingParams
from baton.engine.sampler import SamplingFailed, adjust, keep, sample

VOCAB = 1200


def logits(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row(params: SamplingParams, **fields: Any) -> SampleRow:
    return SampleRow(0, fields.pop("choice", 0), fields.pop("position", 0), params, **fields)


def test_greedy_is_argmax_and_the_lowest_of_equals() -> None:
    scores = logits()
    greedy = SamplingParams(temperature=0.0)
    assert sample(scores, row(greedy)).token_id == int(scores.argmax())
    scores[[700, 30, 900]] = 50.0
    assert sample(scores, row(greedy)).token_id == 30


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
    tokens, weights = keep(scores, params)
    wanted = torch.softmax(warped[0], 0)
    assert set(tokens.tolist()) == set(torch.nonzero(wanted).flatten().tolist())
    torch.testing.assert_close(weights / weights.sum(), wanted[tokens])
    assert len(tokens) == VOCAB or weights.tolist() == sorted(weights.tolist(), reverse=True)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_transformers_own(penalty: float) -> None:
    history = (5, 9, 9, 700, 1199)
    scores = logits()
    processor: Any = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    wanted = processor(torch.tensor([history]), scores[None].clone())[0]
    params = SamplingParams(repetition_penalty=penalty)
    got = adjust(scores, row(params, history=history, num_prompt_tokens=3))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_presence_and_frequency_count_output_tokens_only() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    scores = logits()
    got = adjust(scores, row(params, history=(1, 2, 3, 7, 7, 8), num_prompt_tokens=3))
    wanted = scores.clone()
    wanted[7] -= 0.5 + 2 * 0.25
    wanted[8] -= 0.5 + 0.25
    torch.testing.assert_close(got, wanted)


def test_bias_and_bans_do_not_change_the_callers_logits() -> None:
    scores = logits()
    before = scores.clone()
    params = SamplingParams(temperature=0.0, logit_bias=((17, 100.0), (18, 50.0)))
    assert sample(scores, row(params)).token_id == 17
    assert sample(scores, row(params, banned=(17,))).token_id == 18
    assert torch.equal(scores, before)


def test_banning_everything_fails_the_row() -> None:
    with pytest.raises(SamplingFailed, match="banned"):
        sample(logits(vocab=4), row(SamplingParams(), banned=(0, 1, 2, 3)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_fails_the_row(value: float) -> None:
    scores = logits(vocab=8)
    scores[3 if value != -math.inf else slice(None)] = value
    with pytest.raises(SamplingFailed, match="not a number"):
        sample(scores, row(SamplingParams()))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8, "top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1, "logit_bias": ((3, 1.5),)},
        {"presence_penalty": 1.0},
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings, seed=11)
    scores = logits(3, vocab=12, spread=1.0)
    history = (1, 2, 2)
    draws = 4000
    counts = torch.zeros(12)
    for position in range(draws):
        here = row(params, position=position, choice=position % 3, history=history)
        counts[sample(scores, here).token_id] += 1
    tokens, weights = keep(adjust(scores, row(params, history=history)), params)
    expected = torch.zeros(12)
    expected[tokens] = weights / weights.sum() * draws
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 31.3  # 0.1 % of true samples exceed this at 11 degrees of freedom


def test_a_draw_depends_on_its_key_alone() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=5)
    scores = logits()
    first = [sample(scores, row(params, position=i)).token_id for i in range(50)]
    batch = torch.stack([logits(9), scores, torch.full((VOCAB,), 3.0)])
    again = [sample(batch[1], row(params, position=i)).token_id for i in reversed(range(50))]
    assert first == again[::-1]
    other = replace(params, seed=6)
    assert first != [sample(scores, row(other, position=i)).token_id for i in range(50)]
    assert first != [sample(scores, row(params, position=i, choice=1)).token_id for i in range(50)]


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits()
    wanted = torch.log_softmax(scores, 0)
    params = SamplingParams(temperature=0.3, top_k=3, logit_bias=((4, 80.0),), top_logprobs=5)
    token = sample(scores, row(params, banned=(int(scores.argmax()),)))
    assert token.token_id == 4
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(wanted[4]))
    best = torch.topk(wanted, 5)
    assert [t for t, _ in token.logprobs.top] == best.indices.tolist()
    assert [v for _, v in token.logprobs.top] == pytest.approx(best.values.tolist())
    none = sample(scores, row(replace(params, top_logprobs=None)))
    assert none.logprobs is None
    assert sample(scores, row(replace(params, top_logprobs=0))).logprobs is not None


def test_equal_logits_are_cut_by_id() -> None:
    params = SamplingParams(top_k=3)
    tokens, weights = keep(torch.zeros(1000), params)
    assert tokens.tolist() == [0, 1, 2]
    assert weights.tolist() == pytest.approx([0.001] * 3)
