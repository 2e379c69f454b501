"""Attention of one tile of queries over one run of keys: the plain one and the CPU's own.

A kernel knows neither blocks nor layers. Both have the signature of `Kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.engine.config import TILE
from baton.engine.masks import MaskBank

# How many keys torch's CPU kernel handles before it rescales; its algorithm repeats beyond.
_FLASH_RUN = 512

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Kernel(Protocol):
    """query [heads, rows, D], key [heads, n, D], value [heads, n, Dv], mask [rows, n] with 0 where
    a row sees a key and -inf where not. Rows are all queries that share a KV head.

    Returns output [heads, rows, Dv] and the log-sum-exp of the scores, float32 [heads, rows]; both
    mean nothing for a row that sees no key at all.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch, scores in float32; runs on every device and does everything."""
    scores = torch.matmul(query, key.transpose(1, 2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask.float()
    # A row that sees nothing in this run has -inf everywhere; exp(-inf - 0) is the 0 it should be.
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul((weights / total.clamp_min(1e-30)).to(value.dtype), value)
    return output, (top + torch.log(total)).squeeze(-1)


def flash_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's tiled CPU kernel, which reads keys and values in place. Needs D == Dv, no softcap."""
    assert softcap is None
    output, lse = _flash_cpu(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask.unsqueeze(0).unsqueeze(0),
        scale=scale,
    )
    return output[0], lse[0]


def choose_kernel(
    name: str, device: torch.device, key_size: int, value_size: int, *, softcap: bool
) -> Kernel:
    """The kernel for a configured name. The CPU's own cannot do everything, the plain one can."""
    fits = device.type == "cpu" and value_size <= key_size and not softcap
    return flash_cpu if fits and name != "reference" else reference


def fewest_rows(
    kernel: Kernel, heads: int, per_head: int, size: int, dtype: torch.dtype, device: torch.device
) -> int | None:
    """To how many rows a lone query's heads must be padded to get the bits a whole tile gives.

    Matrix products of few rows take other algorithms, with other bits, than those of many. This
    tries random queries [heads, rows, size] over many lengths; None when only a whole tile, 16 *
    per_head rows, will do.
    """
    generator = torch.Generator().manual_seed(11)
    lengths = [*range(TILE, 2 * _FLASH_RUN + 1, 3 * TILE), 4 * _FLASH_RUN, 8 * _FLASH_RUN]
    masks = MaskBank(dtype, device)

    def random(count: int) -> torch.Tensor:
        return torch.randn(heads, count, size, generator=generator).to(dtype).to(device)

    query, key, value = random(TILE * per_head), random(lengths[-1]), random(lengths[-1])

    def same(rows: int, length: int, offset: int) -> bool:
        mask = masks.take(None, per_head, length)
        whole, _ = kernel(query, key[:, :length], value[:, :length], mask, size**-0.5, None)
        row = offset * per_head
        lone = torch.nn.functional.pad(query[:, row : row + per_head], (0, 0, 0, rows - per_head))
        got, _ = kernel(
            lone, key[:, :length], value[:, :length], mask[row].expand(rows, -1), size**-0.5, None
        )
        return torch.equal(got[:, :per_head], whole[:, row : row + per_head])

    for rows in range(per_head, TILE * per_head):
        if all(same(rows, length, offset) for length in lengths for offset in (0, 5, TILE - 1)):
            return rows
    return None


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], masks: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over several runs of keys from what a kernel gave for each, by log-sum-exps.

    parts: (output [heads, rows, Dv], log-sum-exp [heads, rows]) per run, with its mask [rows, n].
    """
    # The CPU kernel says 0 rather than -inf for a row that sees nothing of a run.
    lses = [
        lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
        for (_, lse), mask in zip(parts, masks, strict=True)
    ]
    lse = torch.stack(lses)
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total).unsqueeze(-1)
    outputs = torch.stack([output for output, _ in parts])
    return (outputs * weights).sum(0).to(outputs.dtype), total
