"""Whole steps of rows with different wishes: each row's token is its own, whatever surrounds it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from batonlm.core.errors import Internal
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import (
    PENDING,
    Chunk,
    SampledToken,
    SampleRow,
    StepPlan,
    StepResult,
)
from batonlm.engine.sampler import LastTokens, SampledStep
from batonlm.engine.sampler_rows import TokenCounts

VOCAB = 1200
GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def logits(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row(params: SamplingParams, **fields: Any) -> SampleRow:
    return SampleRow(
        fields.pop("sequence", 0),
        fields.pop("choice", 0),
        fields.pop("position", 0),
        params,
        **fields,
    )


def step(scores: torch.Tensor, rows: list[SampleRow]) -> StepResult:
    """Each row's logits are its own, and its sequence's id its place."""
    chunks = tuple(
        Chunk(i, (0,), 0, ((i, 1),), (row._replace(sequence_id=i),)) for i, row in enumerate(rows)
    )
    return SampledStep(
        StepPlan(4, chunks), scores, LastTokens(CPU, 4096), TokenCounts(CPU)
    ).result()


def one(scores: torch.Tensor, wanted: SampleRow) -> SampledToken:
    result = step(scores[None], [wanted])
    assert not result.failed
    return result.tokens[0]


WISHES = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(top_k=5, seed=2),
    SamplingParams(top_p=0.7, temperature=0.8, seed=3),
    SamplingParams(min_p=0.02, seed=4),
    SamplingParams(top_k=50, top_p=0.9, min_p=0.01, temperature=1.7, seed=5),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=6),
    SamplingParams(logit_bias=((3, 4.0), (700, -100.0)), top_logprobs=3, seed=7),
    replace(GREEDY, logit_bias=((11, 30.0),), top_logprobs=0),
    replace(GREEDY, repetition_penalty=2.0),
]


def mixed(count: int) -> list[SampleRow]:
    return [
        row(
            WISHES[i % len(WISHES)],
            choice=i % 3,
            position=i,
            banned=(i, 17) if i % 4 == 0 else (),
            history=(1, 2, 2, 800, i) if WISHES[i % len(WISHES)].needs_history else (),
            num_prompt_tokens=2,
            allowed=bytes((i * 37 + j * 11) % 256 for j in range(100)) if i % 3 == 0 else b"",
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_token_that_it_gets_alone(kind: torch.dtype) -> None:
    """In bfloat16 many logits are equal, so ties count."""
    scores = torch.stack([logits(i) for i in range(40)]).to(kind)
    rows = mixed(40)
    alone = [one(scores[i], rows[i]) for i in range(40)]
    for order in (list(range(40)), list(reversed(range(40))), list(range(0, 40, 3))):
        result = step(scores[order], [rows[i] for i in order])
        got = [(token.token_id, token.choice, token.logprobs) for token in result.tokens]
        assert got == [(alone[i].token_id, alone[i].choice, alone[i].logprobs) for i in order]


def test_the_lowest_of_equals_is_the_best() -> None:
    scores = logits()
    scores[[700, 30, 900]] = 50.0
    assert one(scores, row(GREEDY)).token_id == 30
    assert one(scores, row(replace(GREEDY, top_logprobs=1))).token_id == 30
    assert one(scores, row(SamplingParams(top_k=1))).token_id == 30


def test_bias_and_bans_do_not_change_the_callers_logits() -> None:
    scores = logits()
    before = scores.clone()
    params = replace(GREEDY, logit_bias=((17, 100.0), (18, 50.0)))
    assert one(scores, row(params)).token_id == 17
    assert one(scores, row(params, banned=(17,))).token_id == 18
    assert torch.equal(scores, before)


def test_logprobs_are_those_of_all_tokens_whatever_is_allowed() -> None:
    scores = logits()
    free = one(scores, row(replace(GREEDY, top_logprobs=3)))
    best = free.token_id
    only = next(i for i in range(VOCAB) if i != best)
    mask = (1 << only).to_bytes(VOCAB // 8, "little")
    bound = one(scores, row(replace(GREEDY, top_logprobs=3), allowed=mask))
    assert bound.token_id == only
    assert free.logprobs is not None and bound.logprobs is not None
    assert bound.logprobs.top == free.logprobs.top
    assert bound.logprobs.logprob == pytest.approx(torch.log_softmax(scores, 0)[only].item())


def test_rows_that_cannot_be_sampled_fail_alone() -> None:
    scores = torch.stack([logits(i, vocab=8) for i in range(6)])
    scores[1, 3], scores[2, 3], scores[3] = math.nan, math.inf, -math.inf
    everything = tuple(range(8))
    for params in (GREEDY, SamplingParams(top_p=0.9, top_k=3, min_p=0.1)):
        rows = [row(params) for _ in range(6)]
        rows[4] = row(params, banned=everything)
        result = step(scores, rows)
        assert [token.sequence_id for token in result.tokens] == [0, 5]
        assert [sequence for sequence, _ in result.failed] == [1, 2, 3, 4]
        assert all("not a number" in reason for _, reason in result.failed[:3])
        assert "banned" in result.failed[3][1]


@pytest.mark.deep
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
    rows = [row(params, position=i, choice=i % 3, history=history) for i in range(draws)]
    counts = torch.zeros(12)
    for token in step(scores.expand(draws, -1), rows).tokens:
        counts[token.token_id] += 1
    adjusted = scores.clone()
    for token_id, bias in params.logit_bias:
        adjusted[token_id] += bias
    adjusted[[1, 2]] -= params.presence_penalty
    shares = torch.softmax(adjusted / params.temperature, 0)
    order = torch.argsort(shares, descending=True)
    if params.top_k:
        shares[order[params.top_k :]] = 0
    before = shares[order].cumsum(0) - shares[order]
    shares[order[before >= params.top_p]] = 0
    shares[shares < params.min_p * shares.max()] = 0
    expected = shares / shares.sum() * draws
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 31.3  # 0.1 % of true samples exceed this at 11 degrees of freedom


def test_a_draw_depends_on_its_key() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=5)
    scores = logits().expand(50, -1)

    def drawn(params: SamplingParams, choice: int = 0) -> list[int]:
        rows = [row(params, position=i, choice=choice) for i in range(50)]
        return [token.token_id for token in step(scores, rows).tokens]

    first = drawn(params)
    assert drawn(params) == first
    assert drawn(replace(params, seed=6)) != first
    assert drawn(params, choice=1) != first
    assert len(set(first)) > 1


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits()
    wanted = torch.log_softmax(scores, 0)
    params = SamplingParams(temperature=0.3, top_k=3, logit_bias=((4, 80.0),), top_logprobs=5)
    rows = [row(params, banned=(int(scores.argmax()),)), row(replace(params, top_logprobs=0))]
    rows += [row(replace(params, top_logprobs=None)), row(replace(params, top_logprobs=2))]
    first, none, nothing, fewer = step(scores.expand(4, -1), rows).tokens
    assert {token.token_id for token in (first, none, nothing, fewer)} == {4}
    assert first.logprobs is not None and none.logprobs is not None and fewer.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(wanted[4]))
    best = torch.topk(wanted, 5)
    assert [t for t, _ in first.logprobs.top] == best.indices.tolist()
    assert [v for _, v in first.logprobs.top] == pytest.approx(best.values.tolist())
    assert nothing.logprobs is None
    assert none.logprobs.top == ()
    assert fewer.logprobs.top == first.logprobs.top[:2]


def test_logs_are_those_of_torch_up_to_rounding() -> None:
    for vocab, spread in ((50, 0.0), (1200, 3.0), (40000, 0.01), (40000, 6.0)):
        scores = logits(7, vocab, spread)
        wanted = torch.log_softmax(scores.double(), 0)
        token = one(scores, row(SamplingParams(top_logprobs=20, seed=5)))
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(float(wanted[token.token_id]), abs=2e-6)
        assert [v for _, v in token.logprobs.top] == pytest.approx(
            torch.topk(wanted, 20).values.tolist(), abs=2e-6
        )


def test_choices_of_a_prompt_share_its_logits() -> None:
    params = SamplingParams(seed=3)
    rows = tuple(SampleRow(5 + i, i, 0, params) for i in range(6))
    plan = StepPlan(0, (Chunk(5, (0,), 0, (), rows), Chunk(9, (0,), 0, ())))
    result = SampledStep(plan, logits()[None], LastTokens(CPU), TokenCounts(CPU)).result()
    assert [(token.sequence_id, token.choice) for token in result.tokens] == [
        (5 + i, i) for i in range(6)
    ]
    assert [token.token_id for token in result.tokens] == [
        one(logits(), row(params, choice=i)).token_id for i in range(6)
    ]


def test_a_step_without_samples_draws_nothing() -> None:
    plan = StepPlan(3, (Chunk(0, (1, 2), 0, ((0, 1),)),))
    assert SampledStep(
        plan, torch.empty(0, VOCAB), LastTokens(CPU), TokenCounts(CPU)
    ).result() == StepResult(3, ())


def test_tokens_are_filled_in_where_they_are_pending() -> None:
    last = LastTokens(CPU, 4)
    last.store([7, 8, 9], torch.tensor([70, 80, -1]))
    last.store([8, 11], torch.tensor([81, 110]))
    plan = StepPlan(
        0,
        (
            Chunk(11, (PENDING,), 3, ()),
            Chunk(1, (4, 5, 6), 0, ()),
            Chunk(8, (PENDING,), 3, ()),
            Chunk(9, (PENDING,), 3, ()),
            Chunk(7, (PENDING,), 3, ()),
        ),
    )
    token_ids = torch.tensor([-1, 4, 5, 6, -1, -1, -1, 0])
    last.fill(plan, token_ids)
    # A sequence whose sampling failed goes on from a token that exists.
    assert token_ids.tolist() == [110, 4, 5, 6, 81, 0, 70, 0]
    # The longest unseen makes room.
    last.store([12], torch.tensor([120]))
    with pytest.raises(Internal, match="7 has no token"):
        last.fill(plan, token_ids)
    with pytest.raises(Internal, match="more sequences"):
        last.store([1, 2, 3, 4, 5], torch.arange(5))
    with pytest.raises(Internal, match="twice"):
        last.store([1, 1], torch.arange(2))


@pytest.mark.parametrize("wish", WISHES)
def test_a_row_behind_drafts_gets_the_token_that_it_gets_alone(wish: SamplingParams) -> None:
    """Step by step, with right drafts and wrong ones, beside another sequence."""
    last, counts = LastTokens(CPU), TokenCounts(CPU)
    history, drafts = [1, 2, 2, 800], (5, 2, 31)
    for number, taken in enumerate((3, 0, 1, 4)):
        scores = torch.stack([logits(10 * number + i, spread=4.0) for i in range(5)])
        rows = [
            row(wish, sequence=6, position=number + i, num_prompt_tokens=2, banned=(i,))
            for i in range(4)
        ]
        rows[0] = rows[0]._replace(history=tuple(history) if wish.needs_history else ())
        beside = row(WISHES[6], sequence=9, history=(1, 2, 2, 7), num_prompt_tokens=2)
        chunks = (
            Chunk(9, (0,), 0, (), (beside,)),
            Chunk(6, (history[-1], *drafts), 9, (), tuple(rows), num_drafts=3),
        )
        result = SampledStep(StepPlan(number, chunks), scores, last, counts).result()
        assert [token.sequence_id for token in result.tokens] == [9, 6, 6, 6, 6]
        for i, got in enumerate(result.tokens[1:]):
            whole = (*history, *drafts[:i]) if wish.needs_history else ()
            alone = one(scores[1 + i], rows[i]._replace(history=whole))
            assert (got.token_id, got.logprobs) == (alone.token_id, alone.logprobs)
        history += [*drafts, 40 + number][:taken] + [90] * (not taken)
    assert counts.rebuilt <= 2


def test_what_is_behind_drafts_is_not_filled_in() -> None:
    last = LastTokens(CPU)
    rows = tuple(row(GREEDY, sequence=4, position=i) for i in range(2))
    chunks = (
        Chunk(4, (0, 1), 0, (), rows, num_drafts=1),
        Chunk(7, (0,), 0, (), (row(GREEDY, sequence=7),)),
    )
    scores = torch.stack([logits(i) for i in range(3)])
    tokens = SampledStep(StepPlan(0, chunks), scores, last, TokenCounts(CPU)).result().tokens
    ids = torch.tensor([PENDING])
    last.fill(StepPlan(1, (Chunk(7, (PENDING,), 1, ()),)), ids)
    assert ids.tolist() == [tokens[2].token_id]
    with pytest.raises(Internal):
        last.fill(StepPlan(1, (Chunk(4, (PENDING,), 2, ()),)), ids)
