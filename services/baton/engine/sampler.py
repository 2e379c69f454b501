"""Draws tokens from logits, one row at a time; knows neither sequences' KV nor batches.

A row's token is a function of that row's logits, its SampleRow and nothing else, so neighbours
never change it. Order of steps: penalties, bias and bans; temperature; top-k; top-p; min-p; draw.
Repetition penalty and the filters follow transformers' logits processors; presence and frequency
penalties follow OpenAI's definition and count output tokens only.
"""

from __future__ import annotations

import math

import torch

from baton.core.attempt import Logprobs
from baton.core.plan import SampledToken, SampleRow
from baton.core.request import SamplingParams
from baton.engine.random import uniform

_CANDIDATES = (256, 4096)


class SamplingFailed(Exception):
    """One row cannot be sampled. Its text may be shown to the client."""


def sample(logits: torch.Tensor, row: SampleRow) -> SampledToken:
    """logits: [vocab] of any float type, not changed. Raises SamplingFailed."""
    raw = logits.float()
    if not math.isfinite(raw.amax().item()):
        raise SamplingFailed("the model's output is not a number")
    adjusted = adjust(raw, row)
    best = adjusted.argmax()
    if adjusted[best].item() == -math.inf:
        raise SamplingFailed("every token is banned")
    token = int(best) if row.params.greedy else draw(adjusted, row)
    return SampledToken(row.sequence_id, row.choice, token, logprobs(raw, token, row.params))


def adjust(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Penalties, bias and bans. Returns the input itself when there are none."""
    params = row.params
    if not (params.needs_history or params.logit_bias or row.banned):
        return logits
    adjusted = logits.clone()
    if params.repetition_penalty != 1.0 and row.history:
        seen = torch.unique(torch.tensor(row.history, device=logits.device))
        score = adjusted[seen]
        penalty = params.repetition_penalty
        adjusted[seen] = torch.where(score < 0, score * penalty, score / penalty)
    output = row.history[row.num_prompt_tokens :]
    if output and (params.presence_penalty or params.frequency_penalty):
        drawn = torch.tensor(output, device=logits.device)
        used, counts = torch.unique(drawn, return_counts=True)
        adjusted[used] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    if row.banned:
        adjusted[list(row.banned)] = -math.inf
    return adjusted


def draw(adjusted: torch.Tensor, row: SampleRow) -> int:
    """One token by inverse transform over the kept tokens, most likely first."""
    tokens, weights = keep(adjusted, row.params)
    cumulative = weights.double().cumsum(0)
    number = uniform(row.params.seed, row.choice, row.position) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, number, right=True))
    # Rounding may leave the number at the total; the last kept token with weight is then meant.
    return int(tokens[min(index, int((weights > 0).sum()) - 1)])


def keep(adjusted: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids that survive top-k, top-p and min-p, most likely first, and their weights.

    Weights are float32 and need not sum to 1. Equal logits keep the order of their ids.
    """
    scaled = adjusted / params.temperature
    probabilities = torch.softmax(scaled, 0)
    vocab = len(probabilities)
    limit = min(params.top_k, vocab) if params.top_k > 0 else vocab
    if params.top_p < 1.0 or params.min_p > 0.0 or limit < vocab:
        weights, tokens = _leading(probabilities, limit, params)
    else:
        tokens = torch.arange(vocab, device=adjusted.device)
        return tokens, probabilities
    total = weights.sum() if limit < vocab else probabilities.new_ones(())
    if params.top_p < 1.0:
        before = weights.cumsum(0) - weights
        kept = int((before < params.top_p * total).sum())
        tokens, weights = tokens[: max(kept, 1)], weights[: max(kept, 1)]
    if params.min_p > 0.0:
        kept = int((weights >= params.min_p * weights[0]).sum())
        tokens, weights = tokens[: max(kept, 1)], weights[: max(kept, 1)]
    return tokens, weights


def _leading(
    probabilities: torch.Tensor, limit: int, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens, as many as the filters can possibly keep, in a stable order.

    Sorting a whole vocabulary is what sampling costs; nearly always a few hundred tokens hold all
    that top-p or min-p keep, hence the widening looks.
    """
    for look in (*_CANDIDATES, len(probabilities)):
        count = limit if limit < len(probabilities) else min(look, limit)
        found = torch.topk(probabilities, count)
        lowest = found.values[-1]
        enough_p = params.top_p < 1.0 and float(found.values.sum()) > params.top_p
        enough_min = params.min_p > 0.0 and bool(lowest < params.min_p * found.values[0])
        if count == limit or enough_p or enough_min:
            break
    # Ties at the cut and within: by id, so that the order does not depend on topk's internals.
    candidates = torch.nonzero(probabilities >= lowest).flatten()
    weights, order = torch.sort(probabilities[candidates], descending=True, stable=True)
    return weights[:count], candidates[order][:count]


def logprobs(raw: torch.Tensor, token: int, params: SamplingParams) -> Logprobs | None:
    """Natural log of the softmax of the untouched logits [vocab], float32."""
    if params.top_logprobs is None:
        return None
    scores = torch.log_softmax(raw, 0)
    top = torch.topk(scores, min(params.top_logprobs, len(scores)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Logprobs(float(scores[token]), tuple(pairs))
