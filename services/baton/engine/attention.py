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
from baton.core.scheduler.plan import Chunk
from baton.engine.inputs import StepInputs
from baton.engine.kernels import Kernel, merge
from baton.engine.kv_cache import KvCache
from baton.engine.reader import Reader, Reading
from baton.engine.routes import Routes, find_routes
from baton.engine.tiles import Tile, exact_tiles, loose_tiles

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
    """query [heads, T, D], key [kv_heads, T, D], value [kv_heads, T, Dv] -> [T, heads, Dv].

    Rows behind those of the step's chunks are padding: nothing is stored for them, and what comes
    out means nothing.
    """

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
    """Runs the attention of steps over one KvCache, tile by tile.

    exact: a query's bits depend on its sequence's tokens alone. lone_rows: how many rows a query
    that is alone in its tile is padded to, see `kernels.fewest_rows`; None, in exact mode, computes
    whole tiles only.
    """

    def __init__(self, cache: KvCache, kernel: Kernel, *, exact: bool, lone_rows: int | None):
        self.cache = cache
        self.kernel = kernel
        self.lone_rows = lone_rows
        self.reader = Reader(cache, exact=exact)
        self._exact = exact

    def step(self, inputs: StepInputs) -> StepAttention:
        if inputs.stale.numel():
            self.cache.clear(inputs.stale)
        self.reader.begin()
        return StepAttention(self, inputs)

    def tiles(self, chunk: Chunk, first_row: int) -> tuple[Tile, ...]:
        if self._exact:
            return tuple(exact_tiles(chunk, first_row, lone=self.lone_rows is not None))
        return tuple(loose_tiles(chunk, first_row))


class StepAttention:
    """The context object of one step. What does not depend on the layer is computed once."""

    def __init__(self, attention: PagedAttention, inputs: StepInputs):
        self._attention = attention
        self._cache = attention.cache
        self._kernel = attention.kernel
        self._places = inputs.places
        self._chunks: list[tuple[Chunk, tuple[Tile, ...]]] = []
        row = 0
        for chunk in inputs.chunks:
            self._chunks.append((chunk, attention.tiles(chunk, row)))
            row += len(chunk.token_ids)
        self._routes: Routes | None = None
        self._readings: dict[int | None, list[Reading]] = {}

    def attend(
        self,
        arguments: LayerArguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Stores the step's KV, then attends. Shapes as in AttentionContext."""
        own = len(self._places)
        self._cache.write(arguments.layer, self._places, key[:, :own], value[:, :own])
        heads, count, size = query.shape
        routes = self._routes or self._find_routes(heads, count)
        queries = routes.scatter(query.transpose(0, 1).reshape(count * heads, size))
        readings = self._readings.get(arguments.window)
        if readings is None:
            readings = self._read(arguments.window, heads // routes.kv_heads)
        parts = self._tiles(arguments, queries, readings)
        output = routes.gather([part for part, _ in parts])
        output = output.view(count, heads, -1)[..., : self._cache.layout.value_size]
        if arguments.sinks is None:
            return output
        lse = routes.gather([part for _, part in parts]).view(count, heads)
        # Not torch.sigmoid, whose last bits depend on where in an array a number stands.
        share = 1 / (1 + torch.exp(arguments.sinks.float() - lse))
        return output * share.unsqueeze(-1).to(output.dtype)

    def _tiles(
        self, arguments: LayerArguments, queries: list[torch.Tensor], readings: list[Reading]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every tile's output [1, kv_heads, n, Dv] and log-sum-exps [1, kv_heads, n]."""
        kernel, layer = self._kernel, arguments.layer
        scale, softcap = arguments.scale, arguments.softcap
        parts = []
        rest = iter(queries)
        for reading in readings:
            if reading.places is not None:
                keys, values = self._attention.reader.gather(layer, reading.places)
                for tile in reading.tiles:
                    key = keys.narrow(2, tile.first, tile.length)
                    value = values.narrow(2, tile.first, tile.length)
                    parts.append(kernel(next(rest), key, value, tile.mask, scale, softcap))
                continue
            for tile in reading.tiles:
                query = next(rest)
                runs = [
                    kernel(query, keys[layer], values[layer], tile.mask, scale, softcap)
                    for keys, values in tile.runs
                ]
                parts.append(runs[0] if len(runs) == 1 else merge(runs))
        return parts

    def _find_routes(self, heads: int, count: int) -> Routes:
        kv_heads = self._cache.layout.num_kv_heads
        lone_rows = self._attention.lone_rows or heads // kv_heads
        tiles = [tile for _, own in self._chunks for tile in own]
        device = self._places.device
        padding = count - len(self._places)
        self._routes = find_routes(tiles, heads, kv_heads, lone_rows, device, padding)
        return self._routes

    def _read(self, window: int | None, per_head: int) -> list[Reading]:
        read = self._attention.reader.read
        found = [read(chunk, tiles, window, per_head) for chunk, tiles in self._chunks]
        self._readings[window] = found
        return found
