"""Models that attend by code of their own: one sequence at a time, over KV in our block pool.

Where a model's attention cannot be replaced (`interface`), its code still keeps keys and values in
a transformers `Cache`. It is given one whose layers write what is new into the block pool and
return what the sequence has there. All else, masks and positions among it, is the model's own, so
whatever a layer looks at (windows, chunks, biases by distance, an index of its own) is computed as
transformers does. Sequences of a step are computed one after the other: right, and not fast.

A position's row in the pool is what all layers keep of it, one behind the other, as one key of one
head: layers may differ in shape, and nothing is padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.kv.cache import KvCache
from batonlm.engine.kv.extents import spans
from batonlm.engine.sampler import LastTokens

_PAGED = DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer


class Part(NamedTuple):
    """Where in a position's row one layer's keys, values or index keys lie."""

    start: int
    heads: int
    size: int
    """Of a head."""

    @property
    def end(self) -> int:
        return self.start + self.heads * self.size


class LayerKind(NamedTuple):
    """How a layer of a model keeps what it has computed."""

    paged: bool
    """Whether it keeps KV; else nothing."""
    sliding: bool
    """Whether it calls itself one over a window, by which models choose masks."""


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """What the layers of a model that attends by itself keep of a position."""

    kinds: tuple[LayerKind, ...]
    parts: dict[tuple[int, str], Part]
    """By the layer's number, and "keys", "values" or "index"."""

    @property
    def width(self) -> int:
        """Numbers of a position."""
        return max((part.end for part in self.parts.values()), default=0)


FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's code raises that is given what it does not expect."""

Exchange = Callable[[int, str, torch.Tensor], torch.Tensor]
"""(layer, which part, [heads, T, size] of the new positions) -> [heads, all positions, size]."""


class _PagedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of the cache that a model is given for one chunk of one sequence."""

    def __init__(self, index: int, *, sliding: bool, past: int, exchange: Exchange):
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = sliding
        self.is_initialized = True
        self._index, self._past, self._exchange = index, past, exchange

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._exchange(self._index, "keys", key_states[0])
        values = self._exchange(self._index, "values", value_states[0])
        self._past = keys.shape[1]
        return keys[None], values[None]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        return self._exchange(self._index, "index", indexer_key_states)

    def get_seq_length(self) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._past + query_length, 0


def _cache(kinds: Sequence[LayerKind], past: int, exchange: Exchange) -> Cache:
    return Cache(
        layers=[
            _PagedLayer(index, sliding=kind.sliding, past=past, exchange=exchange)
            if kind.paged
            else DummyLayer()  # type: ignore[no-untyped-call]
            for index, kind in enumerate(kinds)
        ]
    )


@lru_cache
def _accepted(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def run_own(
    network: nn.Module,
    token_ids: torch.Tensor,
    past: int,
    wanted: torch.Tensor,
    cache: Cache | None,
) -> torch.Tensor:
    """One sequence's logits [wanted, vocab] by the model's own attention.

    token_ids: int64 [1, T], which follow `past` positions that the cache has. wanted: int64, rows
    of the T. cache: None where all positions are given.
    """
    count = token_ids.shape[1]
    device = token_ids.device
    given: dict[str, Any] = {"input_ids": token_ids, "use_cache": cache is not None}
    accepted = _accepted(type(network).forward)
    if "position_ids" in accepted:
        given["position_ids"] = torch.arange(past, past + count, device=device)[None]
    if cache is not None:
        given["cache"] = cache
    if "logits_to_keep" in accepted:
        logits: torch.Tensor = network(**given, logits_to_keep=wanted).logits[0]
        return logits
    logits = network(**given).logits[0]
    return logits.index_select(0, wanted)


def cache_layers(config: Any) -> list[Any]:
    """The layers of the cache that transformers generates with."""
    return list(DynamicCache(config=config).layers)


def probe_own(network: nn.Module) -> OwnAttention:
    """What the layers of a model keep, from a run of it. Raises UnsupportedModel for what a pool of
    blocks cannot hold, and where the model keeps nothing in a cache."""
    config: Any = network.config
    name = config.model_type
    if "cache" not in _accepted(type(network).forward):
        raise UnsupportedModel(f"{name}: it keeps no keys and values in a cache")
    kinds = []
    for layer in cache_layers(config):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UnsupportedModel(f"{name}: its layers keep a recurrent state, which is not KV")
        if type(layer) not in _PAGED and not isinstance(layer, DummyLayer):
            raise UnsupportedModel(f"{name}: its layers keep a {type(layer).__name__}")
        paged = type(layer) in _PAGED
        kinds.append(LayerKind(paged, paged and bool(layer.is_sliding)))
    device = next(network.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    parts: dict[tuple[int, str], Part] = {}
    kept: dict[tuple[int, str], torch.Tensor] = {}
    width = 0

    def keep(layer: int, which: str, new: torch.Tensor) -> torch.Tensor:
        nonlocal width
        if (layer, which) in parts:
            raise UnsupportedModel(f"{name}: layer {layer} is computed more than once a step")
        if new.dtype != network.dtype:
            raise UnsupportedModel(f"{name}: layer {layer} keeps numbers of another type")
        heads, count, size = new.shape
        if count != tokens.shape[1]:
            raise UnsupportedModel(f"{name}: layer {layer} keeps {count} positions of 2")
        parts[layer, which] = Part(width, heads, size)
        width += heads * size
        kept[layer, which] = new
        return new

    def extend(layer: int, which: str, new: torch.Tensor) -> torch.Tensor:
        return torch.cat((kept[layer, which], new), 1)

    try:
        run_own(network, tokens, 0, tokens[0, :1], _cache(kinds, 0, keep))
        run_own(network, tokens, 2, tokens[0, :1], _cache(kinds, 2, extend))
    except FAULTS as error:
        raise UnsupportedModel(f"{name}: it does not run over a cache of ours") from error
    if not parts:
        raise UnsupportedModel(f"{name}: it keeps no keys and values in a cache")
    return OwnAttention(tuple(kinds), parts)


class OwnBackend:
    """KV memory for a model that attends by itself. Takes a Backend's place in a runner, which
    calls `forward` for a whole step."""

    def __init__(
        self,
        own: OwnAttention,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._own = own
        self.memory = KvCache(layout, num_blocks, block_size, device, dtype=dtype)

    def forward(self, network: nn.Module, plan: StepPlan, last: LastTokens) -> torch.Tensor:
        """Logits [wanted rows, vocab] of a plan's chunks, one chunk after the other."""
        device = self.memory.device
        ids = [token for chunk in plan.chunks for token in chunk.token_ids]
        tokens = torch.tensor(ids, dtype=torch.int64, device=device)
        last.fill(plan, tokens)
        found = []
        sizes = [len(chunk.token_ids) for chunk in plan.chunks]
        for chunk, given in zip(plan.chunks, torch.split(tokens, sizes), strict=True):
            wanted = torch.tensor(chunk.wanted, dtype=torch.int64, device=device)
            cache = _cache(self._own.kinds, chunk.first_position, self._rows(chunk))
            found.append(run_own(network, given[None], chunk.first_position, wanted, cache))
        return torch.cat(found)

    def decode_buffers(self, max_rows: int) -> None:
        """Nothing can be recorded."""

    def forget(self, extents: Extents) -> None:
        """Leaves nothing in these blocks that their next owner could see."""

    def _rows(self, chunk: Chunk) -> Exchange:
        memory = self.memory.keys[0, 0]
        runs = list(spans(chunk.extents, 0, chunk.end_position, self.memory.block_size))
        places = torch.cat([torch.arange(at, at + n, device=memory.device) for at, n in runs])
        new = places[chunk.first_position :]

        def exchange(layer: int, which: str, states: torch.Tensor) -> torch.Tensor:
            part = self._own.parts[layer, which]
            columns = memory[:, part.start : part.end]
            columns.index_copy_(0, new, states.transpose(0, 1).flatten(1))
            if len(runs) == 1:
                rows = columns.narrow(0, *runs[0])
            else:
                rows = columns.index_select(0, places)
            return rows.view(-1, part.heads, part.size).transpose(0, 1)

        return exchange
