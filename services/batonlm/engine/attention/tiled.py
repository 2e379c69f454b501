"""The backend of CPUs, and the plain one for every device: attention tile by tile over a KvCache.

Inputs, tiles, routes and keys that do not depend on the layer are computed once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.interface import ForwardPass, LayerArguments
from batonlm.engine.attention.kernels import Kernel, merge
from batonlm.engine.attention.tiles import (
    LOOSE,
    MaskBank,
    Routes,
    Tile,
    cut_tiles,
    find_routes,
)
from batonlm.engine.config import TILE
from batonlm.engine.kv.cache import KvCache
from batonlm.engine.kv.extents import spans


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A plan's chunks as tensors, one chunk behind the other without padding. All are int64."""

    token_ids: torch.Tensor
    """[1, T]; token ids still to be sampled stay as they are in the plan."""
    positions: torch.Tensor
    """[1, T]."""
    places: torch.Tensor
    """[T], where each row's KV goes."""
    stale: torch.Tensor
    """Places ahead of the sequences' ends, to be zeroed first."""
    sampled: torch.Tensor
    """[S], the rows whose logits are wanted, in order."""


def build_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    stale: list[int] = []
    sampled: list[int] = []
    for chunk in plan.chunks:
        sampled += (len(token_ids) + row for row in chunk.wanted)
        token_ids += chunk.token_ids
        end = chunk.end_position
        positions += range(chunk.first_position, end)
        _extend(places, chunk.extents, chunk.first_position, len(chunk.token_ids), block_size)
        # The chunk that writes a tile's first place clears the rest of the tile, once.
        if end % TILE and end // TILE * TILE >= chunk.first_position:
            _extend(stale, chunk.extents, end, -end % TILE, block_size)

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    rows = tensor(token_ids)[None], tensor(positions)[None]
    return StepInputs(*rows, tensor(places), tensor(stale), tensor(sampled))


def _extend(
    places: list[int], extents: Extents, first_position: int, count: int, block_size: int
) -> None:
    for start, length in spans(extents, first_position, count, block_size):
        places += range(start, start + length)


# Keys in a run from which on another kernel call costs less than a copy.
_WORTH_A_CALL = 512

LayerViews = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""Keys and values of one run of places, for each layer [1, heads, length, size]."""


@dataclass(frozen=True, slots=True)
class TileKeys:
    """The keys and values that one tile reads."""

    runs: tuple[LayerViews, ...]
    """Where they lie; none when they are gathered for the chunk first."""
    first: int
    """Where they begin among those gathered, `length` of them."""
    length: int
    mask: torch.Tensor | None
    """See `kernels.Kernel`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The keys and values of a chunk's tiles."""

    places: torch.Tensor | None
    """int64 [N], what to gather first; None when nothing."""
    tiles: tuple[TileKeys, ...]


class KeyReader:
    """Finds the keys and values that tiles read, once a step and window.

    exact: a tile's keys are always one run, gathered when a sequence's extents are several, so
    that the kernel sees what it would see unfragmented. Otherwise few long runs are read where they
    lie, to be merged: the same to the last bits, and without the copy.
    """

    def __init__(self, cache: KvCache, *, exact: bool, dtype: torch.dtype | None = None):
        """dtype: of the keys and values that the kernel sees; None: as they are kept."""
        self._cache = cache
        self._exact = exact
        self._dtype = dtype or cache.keys.dtype
        rows = TILE if exact else LOOSE
        self._masks = MaskBank(self._dtype, cache.keys.device, rows)
        self._views: dict[tuple[int, int], LayerViews] = {}
        self._former: dict[tuple[int, int], LayerViews] = {}
        # Of latents, a key's start is its value: the kernel is given keys as values.
        self._parts = (cache.keys, cache.values) if cache.layout.value_size else (cache.keys,)
        self._copies = [part.new_empty(0) for part in self._parts]

    def begin(self) -> None:
        """A new step: forgets what the last one did not use. Decode uses most of it again."""
        self._views, self._former = {}, self._views

    def read(
        self, chunk: Chunk, tiles: Sequence[Tile], window: int | None, per_head: int
    ) -> Reading:
        """tiles: all of the chunk. per_head: query heads per KV head."""
        first = tiles[0].first_key(window)
        count = tiles[-1].end - first
        runs = list(spans(chunk.extents, first, count, self._cache.block_size))
        # Numbers of another type are not where they lie.
        as_kept = self._dtype == self._cache.keys.dtype
        whole = as_kept and len(runs) == 1
        # A chunk that begins with an unmasked tile has no other.
        merged = as_kept and self._unmasked(tiles[0], window) and count >= _WORTH_A_CALL * len(runs)
        found = []
        for tile in tiles:
            start = tile.first_key(window)
            length = tile.end - start
            views: tuple[LayerViews, ...] = ()
            if whole:
                views = (self._run(runs[0][0] + start - first, length),)
            elif merged:
                views = tuple(self._run(*run) for run in runs)
            mask = None
            if not self._unmasked(tile, window):
                mask = self._masks.take(tile, window, per_head)
            found.append(TileKeys(views, start - first, length, mask))
        places = None
        if not whole and not merged:
            device = self._cache.device
            places = torch.cat([torch.arange(at, at + n, device=device) for at, n in runs])
        return Reading(places, tuple(found))

    def gather(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [1, heads, N, size] of a reading's places, one behind the
        other; good until the next call.
        """
        if self._dtype != self._cache.keys.dtype:
            keys, values = self._cache.numbers(layer, places, self._dtype)
            return keys.unsqueeze(0), values.unsqueeze(0)
        found = []
        for kind, memory in enumerate(part[layer] for part in self._parts):
            shape = torch.Size((memory.shape[0], len(places), memory.shape[2]))
            if self._copies[kind].numel() < shape.numel():
                self._copies[kind] = memory.new_empty(shape.numel())
            out = self._copies[kind][: shape.numel()].view(shape)
            found.append(torch.index_select(memory, 1, places, out=out).unsqueeze(0))
        return found[0], found[-1]

    def _unmasked(self, tile: Tile, window: int | None) -> bool:
        """Whether every query sees all that the tile reads, and no mask says so.

        The kernel rounds otherwise without a mask, so exact tiles always have one.
        """
        sees_all = window is None or tile.end - tile.first_key(window) <= window
        return tile.lone and sees_all and not self._exact

    def _run(self, start: int, length: int) -> LayerViews:
        """A run of places where it lies."""
        found = self._views.get((start, length)) or self._former.get((start, length))
        if found is None:
            views = [part.narrow(2, start, length).unsqueeze(1).unbind(0) for part in self._parts]
            found = views[0], views[-1]
        self._views[start, length] = found
        return found


class TiledBackend:
    """A Backend: head-major memory, and a kernel that computes tile by tile.

    exact: a query's bits depend on its sequence's tokens alone. lone_rows: how many rows a query
    that is alone in its tile is padded to, see `kernels.fewest_rows`; None, in exact mode, computes
    whole tiles only.
    """

    def __init__(
        self,
        cache: KvCache,
        kernel: Kernel,
        *,
        exact: bool,
        lone_rows: int | None,
        dtype: torch.dtype | None = None,
    ):
        """dtype: as for KeyReader."""
        self.memory = cache
        self.kernel = kernel
        self.exact = exact
        self.lone_rows = lone_rows
        self.reader = KeyReader(cache, exact=exact, dtype=dtype)

    def begin(self, plan: StepPlan) -> ForwardPass:
        inputs = build_inputs(plan, self.memory.block_size, self.memory.device)
        if inputs.stale.numel():
            self.memory.clear(inputs.stale)
        self.reader.begin()
        step = StepAttention(self, plan.chunks, inputs.places)
        return ForwardPass(inputs.token_ids, inputs.positions, inputs.sampled, step.attend)

    def decode_buffers(self, max_rows: int) -> None:
        return None

    def forget(self, extents: Extents) -> None:
        size = self.memory.block_size
        positions = size * sum(count for _, count in extents)
        for start, length in spans(extents, 0, positions, size):
            self.memory.clear(torch.arange(start, start + length, device=self.memory.device))


class StepAttention:
    """The attention of one step. What does not depend on the layer is computed once."""

    def __init__(self, backend: TiledBackend, chunks: Sequence[Chunk], places: torch.Tensor):
        self._backend = backend
        self._cache = backend.memory
        self._places = places
        self._chunks: list[tuple[Chunk, list[Tile]]] = []
        row = 0
        lone = backend.lone_rows is not None
        for chunk in chunks:
            self._chunks.append((chunk, cut_tiles(chunk, row, exact=backend.exact, lone=lone)))
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
        """An AttentionContext."""
        own = len(self._places)
        self._cache.write(arguments.layer, self._places, key[:, :own], value[:, :own])
        heads, count, size = query.shape
        per_head = heads // self._cache.layout.num_kv_heads
        if self._routes is None:
            tiles = [tile for _, tiles in self._chunks for tile in tiles]
            kv_heads, lone_rows = heads // per_head, self._backend.lone_rows or per_head
            device = self._places.device
            self._routes = find_routes(tiles, heads, kv_heads, lone_rows, device, count - own)
        queries = self._routes.scatter(query.transpose(0, 1).reshape(count * heads, size))
        parts = self._tiles(arguments, queries, self._read(arguments.window, per_head))
        output = self._routes.gather([part for part, _ in parts])
        output = output.view(count, heads, -1)[..., : value.shape[-1]]
        if arguments.sinks is None:
            return output
        lse = self._routes.gather([part for _, part in parts]).view(count, heads)
        # Not torch.sigmoid, whose last bits depend on where in an array a number stands.
        share = 1 / (1 + torch.exp(arguments.sinks.float() - lse))
        return output * share.unsqueeze(-1).to(output.dtype)

    def _tiles(
        self, arguments: LayerArguments, queries: list[torch.Tensor], readings: list[Reading]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every tile's output [1, kv_heads, n, Dv] and log-sum-exps [1, kv_heads, n]."""
        kernel, layer = self._backend.kernel, arguments.layer
        scale, softcap = arguments.scale, arguments.softcap
        parts = []
        rest = iter(queries)
        for reading in readings:
            if reading.places is not None:
                gathered = self._backend.reader.gather(layer, reading.places)
                for tile, query in zip(reading.tiles, rest, strict=False):
                    key, value = (part.narrow(2, tile.first, tile.length) for part in gathered)
                    parts.append(kernel(query, key, value, tile.mask, scale, softcap))
                continue
            for tile, query in zip(reading.tiles, rest, strict=False):
                runs = [
                    kernel(query, keys[layer], values[layer], tile.mask, scale, softcap)
                    for keys, values in tile.runs
                ]
                parts.append(runs[0] if len(runs) == 1 else merge(runs))
        return parts

    def _read(self, window: int | None, per_head: int) -> list[Reading]:
        found = self._readings.get(window)
        if found is None:
            read = self._backend.reader.read
            found = [read(chunk, tiles, window, per_head) for chunk, tiles in self._chunks]
            self._readings[window] = found
        return found
