"""Draws tokens from rows of logits, as tensors on any device.

A row's token is a function of that row's inputs alone: neighbours, devices' ways to add and the
number of threads never change it. For that, every token's weight is a *whole number* held in
float64, small enough that sums of them are exact in any order. Nothing here waits for a device.

The tokens of a row are ordered by falling logit, then by id. Every filter keeps a head of that
order: top-k, then top-p over what top-k left, then min-p, as transformers' processors do. The draw
is an inverse transform over what is left, by id.
"""

from __future__ import annotations

import torch

# A float32 that is not negative orders like its bits: 31 of them, looked at from the top.
_DIGITS = ((20, 2048), (10, 1024), (0, 1024))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] of any float type -> highest value [rows] and its lowest id, int64
    [rows]. The value is not finite where a row cannot be sampled."""
    return torch.max(logits, 1)


def penalize(
    logits: torch.Tensor,
    seen: torch.Tensor,
    used: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalized float32 logits [rows, vocab].

    seen: bool [rows, vocab], tokens of prompt or output. used: float32 [rows, vocab], how often the
    output has a token. The penalties are float32 [rows, 1]. Repetition is transformers'; presence
    and frequency follow OpenAI's definition and count output tokens only.
    """
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    return torch.where(seen, repeated, logits) - (presence * (used > 0) + frequency * used)


def distances(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """How far each token lies under its row's best, in units of temperature: float32
    [rows, vocab], 0 for the best. temperature: float32 [rows, 1], above 0."""
    return (logits.amax(1, keepdim=True) - logits) / temperature


def weigh(distance: torch.Tensor) -> torch.Tensor:
    """Whole numbers proportional to the probabilities, float64 [rows, vocab].

    They add up to at most 2**52, below which float64 knows every whole number. What is less likely
    than the best token by about 2**-35 (in a vocabulary of 128 Ki) weighs nothing.
    """
    scale = 2.0 ** (52 - (distance.shape[1] - 1).bit_length())
    return torch.exp(-distance).mul_(scale).round_().double()


def head(distance: torch.Tensor, amounts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Which tokens are kept, bool [rows, vocab]: those before which less than `limit` has come.

    amounts: whole numbers, float64 [rows, vocab], a function of the distance. limit: float64
    [rows, 1], above 0. With amounts of 1 this is top-k, with weights it is top-p. Radix select: the
    bin of the last kept token is found digit by digit, and ties with it are counted by id.
    """
    whole = bits = distance.view(torch.int32)
    ids = None
    before = torch.zeros_like(limit)
    last = torch.zeros_like(limit, dtype=torch.int32)
    for shift, size in _DIGITS:
        # The mask also takes the sign off NaN, which only rows hold that fail anyway.
        digits = ((bits >> shift) & (size - 1)).long()
        sums = amounts.new_zeros(len(bits), size).scatter_add_(1, digits, amounts)
        starts = before + sums.cumsum(1) - sums
        places = torch.arange(size, device=bits.device)
        found = torch.where((starts < limit) & (sums > 0), places, 0).amax(1, keepdim=True)
        before = starts.gather(1, found)
        last = (last * size).bitwise_or_(found.int())
        inside = (bits >> shift) == last
        if len(bits) == 1 and not bits.is_cuda:
            # What is left is little. To know how little a GPU would have to be waited for.
            left = inside.nonzero()[:, 1]
            bits, amounts = bits[:, left], amounts[:, left]
            ids = left if ids is None else ids[left]
        else:
            amounts = torch.where(inside, amounts, 0.0)
    fits = before + amounts.cumsum(1) - amounts < limit
    kept = whole < last
    if ids is None:
        return kept | (inside & fits)
    return kept.index_copy_(1, ids, fits)


def keep(
    distance: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weights of the tokens that survive the filters and 0 for the others, float64 [rows, vocab].

    Filters are float64 [rows, 1], or None where no row has one. top_k: as large as the vocabulary
    keeps all; top_p: a share of what top-k left; min_p: relative to the likeliest token.
    """
    weights = weigh(distance)
    if top_k is not None:
        weights = torch.where(head(distance, torch.ones_like(weights), top_k), weights, 0.0)
    if top_p is not None:
        limit = top_p * weights.sum(1, keepdim=True)
        weights = torch.where(head(distance, weights, limit), weights, 0.0)
    if min_p is not None:
        least = min_p * weights.amax(1, keepdim=True)
        weights = torch.where(weights >= least, weights, 0.0)
    return weights


def draw(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """One id per row, int64 [rows], each token with its share of the weights [rows, vocab].

    number: float64 [rows, 1] in [0, 1).
    """
    cumulative = weights.cumsum(1)
    found = torch.searchsorted(cumulative, number * cumulative[:, -1:], right=True)
    # A row that fails anyway may hold NaN; its id must still be one.
    return found.squeeze(1).clamp_max(weights.shape[1] - 1)
