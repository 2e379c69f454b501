"""Models that attend by code of their own: one sequence at a time, over KV in our block pool.

Where a model's attention cannot be replaced (`interface`), its code still keeps keys and values in
a transformers `Cache`. It is given one whose layers write what is new into the block pool and
return what the sequence has there. All else, masks and positions among it, is the model's own, so
whatever a layer looks at (windows, chunks, biases by distance, an index of its own) is computed as
transformers does. Sequences of a step are computed one after the other: right, and not fast.

A position's row in the pool is what all layers keep of it, one behind the other, as one key of one
head: layers may differ in shape, and nothing is padded.

Layers may also keep a state of the whole sequence: a recurrent one, or the last inputs of a
convolution. States of all layers lie as bytes, one behind the other, in the rows of the blocks in
front of a sequence's table (`KvLayout.state_positions`), and layers compute on them in place: a
chunk begins with the state behind the position before it, and leaves the one behind its last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.caches import CacheOfItsOwn, Held, StateKey, cache_of_its_own
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.kv.cache import KvCache
from batonlm.engine.kv.extents import spans
from batonlm.engine.sampler import LastTokens

_KNOWN = {
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}

_ALIGNED = 16
"""Bytes to whose multiples states, and rows of a model with states, are laid: every number type can
be viewed there."""
_LONE_ROWS = 16384
"""Rows of a state where positions keep nothing: so much smaller than a state is a position's row,
which the pool's blocks need to have."""
_LEAST_ROW = 64
"""Bytes of such a row at least."""
_SCANNED = 256
"""Positions of a chunk's pieces where the configuration names none: the most that any model has."""
_SCAN_COPIES = 4
"""float32 tensors of such a computation that live at once."""


class Part(NamedTuple):
    """Where in a position's row one layer's keys, values or index keys lie."""

    start: int
    heads: int
    size: int
    """Of a head."""

    @property
    def end(self) -> int:
        return self.start + self.heads * self.size


class StatePart(NamedTuple):
    """Where among the bytes of a sequence's state one tensor lies."""

    start: int
    shape: torch.Size
    """With a first dimension of 1."""
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def of(self, state: torch.Tensor) -> torch.Tensor:
        """This tensor as a view of a state's bytes, uint8 [bytes]."""
        return state[self.start : self.end].view(self.dtype).view(self.shape)


class LayerKind(NamedTuple):
    """How a layer of a model keeps what it has computed."""

    paged: bool
    """Whether it keeps KV."""
    sliding: bool
    """Whether it calls itself one over a window, by which models choose masks."""
    states: int = 0
    """How many states of a sequence it keeps of each kind at most."""


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """What the layers of a model that attends by itself keep of a position, and of a sequence."""

    kinds: tuple[LayerKind, ...]
    parts: dict[tuple[int, str], Part]
    """By the layer's number, and "keys", "values" or "index"."""
    states: dict[StateKey, StatePart]
    dtype: torch.dtype
    """Of KV."""
    cache: CacheOfItsOwn | None = None
    """How a model is given its states that has a cache of its own."""
    stepwise: bool = False
    """Whether layers take up a state only where a single position is computed: transformers' code
    of some models begins anew at every longer chunk."""

    @property
    def state_bytes(self) -> int:
        """Of a sequence."""
        return max((part.end for part in self.states.values()), default=0)

    @property
    def width(self) -> int:
        """Numbers of a position's row."""
        size = max((part.end for part in self.parts.values()), default=0)
        if not self.states:
            return size
        least = max(_LEAST_ROW, self.state_bytes // _LONE_ROWS)
        return _aligned(size * self.dtype.itemsize or least) // self.dtype.itemsize

    @property
    def state_positions(self) -> int:
        """Rows of a sequence's state."""
        return -(-self.state_bytes // (self.width * self.dtype.itemsize)) if self.states else 0

    def scan_bytes(self, text: Any) -> int:
        """Of a position, while the states behind all positions of a chunk are computed. text: the
        configuration.

        A state of numbers by channel is computed for every position; of matrices by head, positions
        are compared with those in the same piece of the chunk.
        """
        shapes = [part.shape for key, part in self.states.items() if key.which == "recurrent"]
        named = (getattr(text, name, None) for name in ("chunk_size", "mamba_chunk_size"))
        piece = next((int(size) for size in named if size), _SCANNED)
        numbers = [shape[1] * piece if len(shape) > 3 else shape.numel() for shape in shapes]
        if self.cache is not None:
            # Some are of all layers.
            numbers = [shape[1] * (piece if len(shape) > 3 else 1) for shape in shapes]
        return _SCAN_COPIES * 4 * max(numbers, default=0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


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


class _PagedStateLayer(LinearAttentionLayer, _PagedLayer):  # type: ignore[misc, no-untyped-call, override]
    """One that keeps a state, too."""

    def __init__(self, states: int, index: int, *, sliding: bool, past: int, exchange: Exchange):
        LinearAttentionLayer.__init__(self, states)
        _PagedLayer.__init__(self, index, sliding=sliding, past=past, exchange=exchange)


def _cache(
    kinds: Sequence[LayerKind], past: int, exchange: Exchange, held: Held | None = None
) -> Cache:
    """held: None lets layers make states of their own."""
    layers: list[Any] = []
    for index, kind in enumerate(kinds):
        if not kind.paged:
            empty: Any = DummyLayer
            layers.append(LinearAttentionLayer(kind.states) if kind.states else empty())
        elif kind.states:
            layers.append(
                _PagedStateLayer(
                    kind.states, index, sliding=kind.sliding, past=past, exchange=exchange
                )
            )
        else:
            layers.append(_PagedLayer(index, sliding=kind.sliding, past=past, exchange=exchange))
    for key, tensor in (held or {}).items():
        layer = layers[key.layer]
        if key.which == "recurrent":
            layer.recurrent_states[key.number] = tensor
            layer.is_recurrent_states_initialized[key.number] = True
            continue
        layer.dtype, layer.device = tensor.dtype, tensor.device
        layer.conv_states[key.number] = tensor
        layer.conv_kernel_size[key.number] = tensor.shape[-1]
        layer.is_conv_states_initialized[key.number] = True
        layer.has_previous_state[key.number] = past > 0
    return Cache(layers=layers)


def _kept(
    special: CacheOfItsOwn | None,
    kinds: Sequence[LayerKind],
    past: int,
    exchange: Exchange,
    held: Held | None,
) -> dict[str, Any]:
    """What a model is given that keeps what it has computed, by its parameters' names."""
    if special is None or held is None:
        return {"cache": _cache(kinds, past, exchange, held)}
    return special.given(_cache(kinds, past, exchange).layers, past, held)


def _made(cache: Cache) -> dict[StateKey, torch.Tensor]:
    """The states that a cache's layers have made."""
    found: dict[StateKey, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for which in ("conv", "recurrent"):
                for i, tensor in getattr(layer, f"{which}_states").items():
                    if tensor is not None:
                        found[StateKey(index, which, i)] = tensor
    return found


@lru_cache
def _accepted(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def run_own(
    network: nn.Module,
    token_ids: torch.Tensor,
    past: int,
    wanted: torch.Tensor,
    kept: Mapping[str, Any] | None,
) -> torch.Tensor:
    """One sequence's logits [wanted, vocab] by the model's own attention.

    token_ids: int64 [1, T], which follow `past` positions that are kept. wanted: int64, rows of the
    T. kept: what the model is given that keeps them, by its parameters' names; None where all
    positions are given.
    """
    count = token_ids.shape[1]
    device = token_ids.device
    given: dict[str, Any] = {"input_ids": token_ids, "use_cache": kept is not None}
    accepted = _accepted(type(network).forward)
    if "position_ids" in accepted:
        given["position_ids"] = torch.arange(past, past + count, device=device)[None]
    given |= kept or {}
    if "logits_to_keep" in accepted:
        logits: torch.Tensor = network(**given, logits_to_keep=wanted).logits[0]
        return logits
    logits = network(**given).logits[0]
    return logits.index_select(0, wanted)


def cache_layers(config: Any) -> list[Any]:
    """The layers of the cache that transformers generates with. Raises UnsupportedModel where it
    has no such layers."""
    try:
        return list(DynamicCache(config=config).layers)
    except FAULTS as error:
        raise UnsupportedModel(f"{config.model_type}: its layers are kept in no cache") from error


def keeps_states(config: Any) -> bool:
    """Whether layers of a model keep a state of the sequence in its cache."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache_layers(config))


def probe_own(network: nn.Module) -> OwnAttention:
    """What the layers of a model keep, from a run of it. Raises UnsupportedModel for what a pool of
    blocks cannot hold, and where the model keeps nothing in a cache."""
    config: Any = network.config
    name = config.model_type
    special = cache_of_its_own(network)
    if special is None and "cache" not in _accepted(type(network).forward):
        raise UnsupportedModel(f"{name}: it keeps no keys and values in a cache")
    kinds = []
    if special is not None:
        kinds = [LayerKind(paged=True, sliding=False)] * int(config.num_hidden_layers)
    for layer in cache_layers(config) if special is None else ():
        if type(layer) not in _KNOWN:
            raise UnsupportedModel(f"{name}: its layers keep a {type(layer).__name__}")
        paged = isinstance(layer, CacheLayerMixin)
        states = getattr(layer, "number_of_states", 0)
        kinds.append(LayerKind(paged, paged and bool(layer.is_sliding), states))
    device = next(network.parameters()).device
    tokens = torch.zeros(1, _PROBED, dtype=torch.int64, device=device)
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
            raise UnsupportedModel(f"{name}: layer {layer} keeps {count} positions of {_PROBED}")
        parts[layer, which] = Part(width, heads, size)
        width += heads * size
        kept[layer, which] = new
        return new

    def extend(layer: int, which: str, new: torch.Tensor) -> torch.Tensor:
        return torch.cat((kept[layer, which], new), 1)

    def run(count: int, held: Held) -> torch.Tensor:
        copies = {key: held[key].clone() for key in held}
        given = _kept(special, kinds, _PROBED, extend, copies)
        wanted = torch.arange(count, device=device)
        return run_own(network, tokens[:, :count], _PROBED, wanted, given)

    states = None if special is None else special.empty()
    first = _kept(special, kinds, 0, keep, states)
    try:
        run_own(network, tokens, 0, tokens[0, :1], first)
        if special is None or states is None:
            states = _made(first["cache"])
        else:
            special.take(first, states)
        run(2, states)
    except FAULTS as error:
        raise UnsupportedModel(f"{name}: it does not run over a cache of ours") from error
    if not parts and not states:
        raise UnsupportedModel(f"{name}: it keeps no keys and values in a cache")
    if getattr(network, "_is_stateful", False) and not states:
        raise UnsupportedModel(f"{name}: it keeps its recurrent state outside of its cache")
    return OwnAttention(
        tuple(kinds),
        parts,
        _laid_out(states),
        network.dtype,  # type: ignore[arg-type]
        special,
        device.type != "meta" and _is_stepwise(run, states),
    )


_PROBED = 2
"""Positions of the first run that shows what a model keeps."""


def _laid_out(states: Mapping[StateKey, torch.Tensor]) -> dict[StateKey, StatePart]:
    found: dict[StateKey, StatePart] = {}
    start = 0
    for key, tensor in states.items():
        found[key] = StatePart(start, tensor.shape, tensor.dtype)
        start = _aligned(found[key].end)
    return found


def _is_stepwise(run: Callable[[int, Held], torch.Tensor], states: Held) -> bool:
    """Whether a chunk of several positions goes on without some state that a single position reads.

    A state that is no number makes logits none, if it is read. Of layers that keep the same, one is
    tried. run: (positions, state) -> logits behind each.
    """
    alike = {(key.which, key.number, t.shape, t.dtype): key for key, t in states.items()}

    def reads(count: int, key: StateKey) -> bool:
        try:
            found = run(count, {**states, key: torch.full_like(states[key], torch.nan)})
        except FAULTS:
            return True
        return bool(found.isnan().any())

    return any(
        states[key].is_floating_point() and reads(1, key) and not reads(2, key)
        for key in alike.values()
    )


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
        self.stepwise = own.stepwise or (own.cache is not None and own.cache.stepwise)
        self._front = layout.state_blocks(block_size) * block_size
        """Positions of a table before the sequence's first one."""

    def forward(self, network: nn.Module, plan: StepPlan, last: LastTokens) -> torch.Tensor:
        """Logits [wanted rows, vocab] of a plan's chunks, one chunk after the other."""
        device = self.memory.device
        ids = [token for chunk in plan.chunks for token in chunk.token_ids]
        tokens = torch.tensor(ids, dtype=torch.int64, device=device)
        last.fill(plan, tokens)
        found = []
        sizes = [len(chunk.token_ids) for chunk in plan.chunks]
        for chunk, given in zip(plan.chunks, torch.split(tokens, sizes), strict=True):
            with self._state(chunk) as (held, rows_of_state):
                copied = {copy.position: copy.extents for copy in chunk.state_copies}
                for start, count in self._pieces(chunk):
                    rows = [row - start for row in chunk.wanted if start <= row < start + count]
                    wanted = torch.tensor(rows, dtype=torch.int64, device=device)
                    first = chunk.first_position + start
                    exchange = self._exchange(chunk.extents, first, count)
                    kept = _kept(self._own.cache, self._own.kinds, first, exchange, held)
                    piece = given[None, start : start + count]
                    found.append(run_own(network, piece, first, wanted, kept))
                    if self._own.cache is not None:
                        self._own.cache.take(kept, held)
                    if (extents := copied.get(first + count)) is not None:
                        self._put(rows_of_state, extents)
        return torch.cat(found)

    def decode_buffers(self, max_rows: int) -> None:
        """Nothing can be recorded."""

    def forget(self, extents: Extents) -> None:
        """Leaves nothing in these blocks that their next owner could see."""

    def _pieces(self, chunk: Chunk) -> list[tuple[int, int]]:
        """What of a chunk can be computed at once, as (first, count) of its positions. A state is
        copied between two of them."""
        count, begun = len(chunk.token_ids), chunk.first_position
        ends = {copy.position - begun for copy in chunk.state_copies}
        cuts = [0, *sorted(ends | {count})]
        if self._own.stepwise:
            cuts = [*range(count + 1)] if begun else [0, *range(cuts[1], count + 1)]
        return [(start, end - start) for start, end in pairwise(cuts)]

    @contextmanager
    def _state(self, chunk: Chunk) -> Iterator[tuple[Held, torch.Tensor]]:
        """A sequence's state, zeros before its first position, and the rows [state_positions,
        width] that it is made of: where it lies, if that is one run of blocks, else a copy that is
        put back."""
        memory = self.memory.keys[0, 0]
        if not self._own.states:
            yield {}, memory[:0]
            return
        runs = self._runs(chunk.extents)
        lying = [memory.narrow(0, *run) for run in runs]
        rows = lying[0] if len(runs) == 1 else torch.cat(lying)
        numbers = rows.view(-1).view(torch.uint8)
        held = {key: part.of(numbers) for key, part in self._own.states.items()}
        if not chunk.first_position:
            rows.zero_()
            if self._own.cache is not None:
                for key, tensor in self._own.cache.empty().items():
                    held[key].copy_(tensor)
        yield held, rows
        if len(runs) > 1:
            self._put(rows, chunk.extents)

    def _runs(self, extents: Extents) -> list[tuple[int, int]]:
        """Where a state lies at the front of some blocks: (first row, number of rows)."""
        count = self.memory.layout.state_positions
        return list(spans(extents, 0, count, self.memory.block_size))

    def _put(self, rows: torch.Tensor, extents: Extents) -> None:
        """Copies a state's rows to the front of some blocks."""
        runs = self._runs(extents)
        for run, part in zip(runs, torch.split(rows, [n for _, n in runs]), strict=True):
            self.memory.keys[0, 0].narrow(0, *run).copy_(part)

    def _exchange(self, extents: Extents, first: int, count: int) -> Exchange:
        """Of `count` positions from `first` on."""
        memory = self.memory.keys[0, 0]
        runs = list(spans(extents, self._front, first + count, self.memory.block_size))
        places = torch.cat([torch.arange(at, at + n, device=memory.device) for at, n in runs])
        new = places[first:]

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
