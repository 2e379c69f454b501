"""Paged attention behind transformers' AttentionInterface: one function, one context object.

Knows layers, tiles and the KV memory; the arithmetic of a tile is a kernel's. The model passes our
context through its layers as the keyword argument `baton_context`; every attention layer ends up
in `paged`, which hands over to `context.attend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from baton.core.errors import Internal
from baton.engine.config import TILE
from baton.engine.inputs import StepInputs, Tile, TileGroup
from baton.engine.kernels import Kernel, merge
from baton.engine.kv_cache import KvCache
from baton.engine.masks import MaskBank
from baton.engine.spans import spans

# No mask function is registered under this name, so transformers builds no masks at all. The name
# avoids the substrings that transformers treats specially.
INTERFACE = "baton_paged"


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What a model says about one attention layer beside its tensors."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionContext(Protocol):
    """query [heads, T, D], key [kv_heads, T, D], value [kv_heads, T, Dv] -> [T, heads, Dv]."""

    def attend(
        self,
        arguments: LayerArguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor: ...


def paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    baton_context: AttentionContext | None = None,
    position_bias: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: [1, heads, T, D] in, [1, T, heads, Dv] out.

    Raises Internal for anything that would silently give other attention than the model's own; the
    loader turns that into a refusal.
    """
    if baton_context is None:
        raise Internal("the model does not pass keyword arguments on to attention")
    if attention_mask is not None or position_bias is not None:
        raise Internal("the model passes a mask or bias of its own to attention")
    if not getattr(module, "is_causal", True):
        raise Internal("the model's attention looks ahead")
    if query.shape[0] != 1:
        raise Internal("the model splits the flattened batch")
    arguments = LayerArguments(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap,
        sinks=s_aux,
    )
    # Attention is exact by itself: catching its many small calls would only cost time.
    with torch._C.DisableTorchFunction():
        output = baton_context.attend(arguments, query[0], key[0], value[0])
    return output[None], None


AttentionInterface.register(INTERFACE, paged)


class PagedAttention:
    """Runs the attention of steps over one KvCache.

    exact: a query's bits depend on its sequence's tokens alone. Keys that lie in several extents
    are then gathered, so that the kernel always sees the one run it would see unfragmented;
    otherwise each extent is read in place and the parts are merged by log-sum-exp, which is faster
    and differs in the last bits. lone_rows: how many rows a query that is alone in its tile is
    padded to, see `kernels.fewest_rows`; None computes whole tiles only.
    """

    def __init__(self, cache: KvCache, kernel: Kernel, *, exact: bool, lone_rows: int | None):
        self.lone_rows = lone_rows
        self._cache = cache
        self._kernel = kernel
        self._exact = exact
        self._masks = MaskBank(cache.keys.dtype, cache.keys.device)

    def step(self, inputs: StepInputs) -> StepAttention:
        if inputs.stale.numel():
            self._cache.clear(inputs.stale)
        return StepAttention(self, inputs)

    def attend(
        self,
        arguments: LayerArguments,
        inputs: StepInputs,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Stores the step's KV, then attends. Shapes as in AttentionContext."""
        self._cache.write(arguments.layer, inputs.places, key, value)
        query = query.transpose(0, 1)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in inputs.groups:
            rows = self._group(arguments, group, query)
            output[group.targets] = rows if group.kept is None else rows[group.kept]
        return output

    def _group(
        self, arguments: LayerArguments, group: TileGroup, query: torch.Tensor
    ) -> torch.Tensor:
        """query [T, heads, D] -> the group's rows, [tiles * width, heads, Dv]."""
        layout = self._cache.layout
        kv_heads, per_head = layout.num_kv_heads, query.shape[1] // layout.num_kv_heads
        tiles, rows = len(group.tiles), group.width * per_head
        queries = query[group.rows].view(tiles, group.width, kv_heads, per_head, -1)
        queries = queries.transpose(1, 2).reshape(tiles, kv_heads, rows, -1)
        if group.width == 1 and self.lone_rows is not None and rows < self.lone_rows:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, self.lone_rows - rows))
        parts = [
            self._tile(arguments, tile, queries[i], per_head, group.width)
            for i, tile in enumerate(group.tiles)
        ]
        output = torch.stack(parts)[:, :, :rows, : layout.value_size]
        output = output.view(tiles, kv_heads, group.width, per_head, -1).transpose(1, 2)
        return output.reshape(tiles * group.width, kv_heads * per_head, -1)

    def _tile(
        self,
        arguments: LayerArguments,
        tile: Tile,
        query: torch.Tensor,
        per_head: int,
        width: int,
    ) -> torch.Tensor:
        first = 0
        if arguments.window is not None:
            first = max(0, tile.end - TILE - arguments.window + 1) // TILE * TILE
        mask = self._masks.take(arguments.window, per_head, tile.end - first)
        if width == 1:
            row = tile.first_position % TILE * per_head
            mask = mask[row].expand(query.shape[1], -1)
        keys, values = self._cache.keys[arguments.layer], self._cache.values[arguments.layer]
        runs = list(spans(tile.extents, first, tile.end - first, self._cache.block_size))
        if len(runs) > 1 and self._exact:
            key = torch.cat([keys.narrow(1, *run) for run in runs], 1)
            value = torch.cat([values.narrow(1, *run) for run in runs], 1)
            output, lse = self._kernel(query, key, value, mask, arguments.scale, arguments.softcap)
        else:
            parts = []
            masks = torch.split(mask, [length for _, length in runs], 1)
            for run, seen in zip(runs, masks, strict=True):
                key, value = keys.narrow(1, *run), values.narrow(1, *run)
                parts.append(
                    self._kernel(query, key, value, seen, arguments.scale, arguments.softcap)
                )
            output, lse = parts[0] if len(parts) == 1 else merge(parts, masks)
        if arguments.sinks is not None:
            output = _with_sinks(output, lse, arguments.sinks, per_head)
        return output


class StepAttention:
    """The context object of one step."""

    def __init__(self, attention: PagedAttention, inputs: StepInputs):
        self._attention = attention
        self._inputs = inputs

    def attend(
        self,
        arguments: LayerArguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        return self._attention.attend(arguments, self._inputs, query, key, value)


def _with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, per_head: int
) -> torch.Tensor:
    """Adds each query head's sink to the softmax's denominator.

    output [kv_heads, rows, Dv], lse [kv_heads, rows], sinks [heads]. Rows are laid out position by
    position, per_head query heads each; padding rows get any sink.
    """
    heads = sinks.float().view(-1, per_head)
    repeats = -(-lse.shape[1] // per_head)
    sink = heads.repeat(1, repeats)[:, : lse.shape[1]]
    # Not torch.sigmoid, whose last bits depend on where in an array a number stands.
    share = 1 / (1 + torch.exp(sink - lse))
    return output * share.unsqueeze(-1).to(output.dtype)
