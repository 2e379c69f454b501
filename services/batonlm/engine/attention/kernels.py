"""Attention of one tile of queries over one run of keys: the plain kernel and the CPU's own.

A kernel sees neither blocks nor layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from batonlm.engine.attention.tiles import MaskBank, Tile
from batonlm.engine.config import TILE

# How many keys torch's CPU kernel handles before it rescales; its algorithm repeats beyond.
_FLASH_RUN = 512

# Bound to its overload, because looking for one takes longer than a short tile's arithmetic.
_flash_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, float | None],
    tuple[torch.Tensor, torch.Tensor],
]
"""(query [1, heads, rows, D], key [1, heads, n, D], value [1, heads, n, Dv], mask, scale, softcap)
-> output [1, heads, rows, Dv] and the log-sum-exp of the scores, float32 [1, heads, rows].

Rows are all queries that share a KV head. mask: [1, 1, rows or 1, n] with 0 where a row sees a key
and -inf where not, or None when all rows see all keys. The results mean nothing for a row that sees
no key at all.
"""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch, scores in float32; runs on every device and does everything."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask.float()
    # A row that sees nothing has -inf everywhere; exp(-inf - 0) is the 0 it should be.
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul((weights / total.clamp_min(1e-30)).to(value.dtype), value)
    return output, (top + torch.log(total)).squeeze(-1)


def flash_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's tiled CPU kernel, which reads keys and values in place. Needs D == Dv, no softcap."""
    assert softcap is None
    output, lse = _flash_cpu(query, key, value, attn_mask=mask, scale=scale)
    return output, lse


def by_position(per_head: int) -> Kernel:
    """`flash_cpu` for many query heads over one KV head, as of latents: [1, 1, rows, ..].

    The kernel is given every position's query heads, at most 16 at a time, as if they had a KV head
    of their own. It computes these one by one: a row has the bits of a query that is alone, without
    padding, and cores share out a single query.
    """
    rows = max(count for count in range(1, TILE + 1) if per_head % count == 0)

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = query.shape[2] // rows
        if mask is not None and mask.shape[2] > 1:
            # The same for all rows of a position.
            mask = mask[0, 0, ::rows, None][None]
        output, lse = flash_cpu(
            query.view(1, heads, rows, -1),
            key.expand(-1, heads, -1, -1),
            value.expand(-1, heads, -1, -1),
            mask,
            scale,
            softcap,
        )
        return output.reshape(1, 1, heads * rows, -1), lse.reshape(1, 1, -1)

    return kernel


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
    masks = MaskBank(dtype, device, TILE)

    def random(count: int) -> torch.Tensor:
        return torch.randn(1, heads, count, size, generator=generator).to(dtype).to(device)

    query, key, value = random(TILE * per_head), random(lengths[-1]), random(lengths[-1])

    def attend(rows: torch.Tensor, tile: Tile) -> torch.Tensor:
        mask = masks.take(tile, None, per_head)
        seen = key[:, :, : tile.end], value[:, :, : tile.end]
        return kernel(rows, *seen, mask, size**-0.5, None)[0]

    def same(rows: int, length: int, offset: int) -> bool:
        start, row = length - TILE, offset * per_head
        whole = attend(query, Tile(0, start, TILE, start, length, False))
        lone = torch.nn.functional.pad(
            query[:, :, row : row + per_head], (0, 0, 0, rows - per_head)
        )
        got = attend(lone, Tile(0, start + offset, 1, start, length, True))
        return torch.equal(got[:, :, :per_head], whole[:, :, row : row + per_head])

    for rows in range(per_head, TILE * per_head):
        if all(same(rows, length, offset) for length in lengths for offset in (0, 5, TILE - 1)):
            return rows
    return None


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over several runs of keys from what a kernel gave for each, by log-sum-exps.

    parts: (output [..., rows, Dv], log-sum-exp [..., rows]) per run; every row sees all keys.
    """
    lse = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total).unsqueeze(-1)
    outputs = torch.stack([output for output, _ in parts])
    return (outputs * weights).sum(0).to(outputs.dtype), total
