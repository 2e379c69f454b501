"""Attention by its definition, in float64: what kernels are held against."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [heads, n, D] of the last n positions of key [kv_heads, N, D] and value [kv_heads, N,
    Dv] -> float64 [n, heads, Dv]. sinks: [heads], scores that take weight and give no value.
    """
    heads, count, _ = query.shape
    length = key.shape[1]
    key, value = (t.double().repeat_interleave(heads // len(t), 0) for t in (key, value))
    scores = query.double() @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(length, device=query.device)
    back = at[length - count :, None] - at[None]
    seen = (back >= 0) & (back < (window or length))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, count, 1)
        scores = torch.cat([scores, sink], 2)
    weights = torch.softmax(scores, 2)[:, :, :length]
    return (weights @ value).transpose(0, 1)
