"""The adapters of a runner: kept within two bounds of memory, and added to the rows that want them.

All loaded adapters are in host memory as they are stored. Those that steps compute with are ready
on the device, in the form that is fastest there; the least recently used make room, and a step that
wants more than fit is computed in parts. Base layers stay what they are, quantised or not: a hook
behind each adds to its output.

A step's chunks are computed in the order of their adapters, so that an adapter's rows lie side by
side and each of its products is one product of a slice, cut in proven numbers of rows as all are in
exact mode: a row's bits do not depend on which adapters its neighbours have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from batonlm.core.errors import Internal, NotFound, Overloaded
from batonlm.core.request.model import AdapterDescription
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.adapters.files import AdapterFiles, Matrices, read_adapter, refused
from batonlm.engine.config import EngineConfig
from batonlm.engine.device import upload
from batonlm.engine.exact import NotExact
from batonlm.engine.fused.decoder import Decoder, LinearPart
from batonlm.engine.kept import KeptLinear
from batonlm.engine.lean import Conv1D
from batonlm.engine.linear import Bound, Chooser, PackedLinear
from batonlm.engine.memory import size

log = logging.getLogger(__name__)

_RANKS = 8
"""Ranks are padded to a multiple of so many, so that there are few shapes to time and prove."""
_LINEAR = nn.Linear, KeptLinear, PackedLinear


class Place(NamedTuple):
    """Where a linear layer of transformers' network is computed."""

    layer: int
    """Which of the layers with hooks."""
    inputs: int
    first: int
    """Of that layer's outputs, the first that are this one's."""
    outputs: int


class Up(NamedTuple):
    """Makes what is added to some outputs of a layer."""

    first: int
    outputs: int
    product: Bound


class Addition(NamedTuple):
    """What an adapter adds to a layer, of which it may adapt several parts."""

    down: Bound
    """Of all parts, one behind the other: they have the same inputs."""
    ranks: list[int]
    """Of each part."""
    ups: tuple[Up, ...]


@dataclass(frozen=True, slots=True)
class ReadyAdapter:
    """An adapter that steps can compute with."""

    additions: tuple[Addition | None, ...]
    """To each layer with a hook."""
    num_bytes: int


class Segments(NamedTuple):
    """A step's rows, cut where the adapter changes."""

    sizes: list[int]
    """Rows of each segment, side by side."""
    adapters: tuple[ReadyAdapter | None, ...]


_NONE = Segments([], ())


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One whose files were read."""

    files: AdapterFiles
    description: AdapterDescription


class Adapters:
    """Loads on any thread; all else is called by the engine thread."""

    def __init__(
        self,
        network: nn.Module,
        run: Callable[[], object],
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        exact: bool,
        alone: bool,
    ):
        """network: the one that runs, its layers packed. run: has it compute a prompt. dtype: of
        its rows. alone: whether it computes one chunk after the other."""
        self._device, self._dtype, self._alone = device, dtype, alone
        self._ready_bytes, self._loaded_bytes = (
            config.adapter_memory_bytes,
            config.all_adapter_bytes,
        )
        self._chooser = Chooser(exact=exact, max_batch=config.max_batch)
        self._layers, self._places = find_places(network, run)
        for index, layer in enumerate(self._layers):
            layer.register_forward_hook(self._adds(index))
        self._segments = _NONE
        self._lock = threading.Lock()
        """Over what follows, for moments only."""
        self._loaded: dict[str, LoadedAdapter] = {}
        self._ready: dict[str, ReadyAdapter] = {}
        """The least recently used first."""
        self._being_bound = 0
        """Bytes of the one that a step makes ready."""

    def load(self, folder: Path) -> AdapterDescription:
        """See `ModelRunner.load_adapter`."""
        files = read_adapter(folder, self._loaded_bytes)
        self._check(files)
        with self._lock:
            known = self._loaded.get(files.digest)
        if known is not None:
            return replace(known.description, name=files.name)
        self._check_room(files)
        try:
            # Also finds the forms of new shapes, so that no step has to.
            ready = self._bind(files)
        except NotExact as error:
            raise refused(files.name, f"{error}: it can be had without exact mode only") from error
        if ready.num_bytes > self._ready_bytes:
            raise refused(
                files.name,
                f"it takes {size(ready.num_bytes)}, and adapters have {size(self._ready_bytes)}",
            )
        found = AdapterDescription(files.name, files.digest, files.rank, ready.num_bytes)
        with self._lock:
            self._check_room(files)
            self._loaded[files.digest] = LoadedAdapter(files, found)
            if self._free_bytes() >= ready.num_bytes:
                self._ready[files.digest] = ready
        log.info(
            "adapter %s: %s, rank %d, %s",
            files.name,
            files.digest,
            found.rank,
            size(found.num_bytes),
        )
        return found

    def _check_room(self, files: AdapterFiles) -> None:
        """Raises Overloaded."""
        others = sum(each.files.num_bytes for each in list(self._loaded.values()))
        if files.digest not in self._loaded and others + files.num_bytes > self._loaded_bytes:
            raise Overloaded(
                f"The memory for adapters is full: {size(others)} of {size(self._loaded_bytes)} "
                f"are taken, and {files.name} has {size(files.num_bytes)}."
            )

    def unload(self, digest: str) -> None:
        """See `ModelRunner.unload_adapter`."""
        with self._lock:
            if self._loaded.pop(digest, None) is None:
                raise NotFound("This worker has no such adapter.", field="adapter")
            self._ready.pop(digest, None)

    def forward(self, plan: StepPlan, compute: Callable[[StepPlan], torch.Tensor]) -> torch.Tensor:
        """Logits [wanted rows, vocab] of a plan. compute: the same by the network, of whichever
        chunks, in a tensor that stays. Raises Internal for an adapter that is not loaded."""
        chunks = plan.chunks
        order = list(range(len(chunks)))
        if not self._alone:
            order.sort(key=lambda index: chunks[index].adapter)
        found = []
        for part in self._parts([chunks[index] for index in order]):
            self._segments = self._cut(part)
            try:
                found.append(compute(replace(plan, chunks=tuple(part))))
            finally:
                self._segments = _NONE
        logits = found[0] if len(found) == 1 else torch.cat(found)
        if order == sorted(order):
            return logits
        return logits.index_select(0, upload(_rows(chunks, order), torch.int64, logits.device))

    def _parts(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Chunks in order, as many at a time as there is room for their adapters."""
        part: list[Chunk] = []
        taken: dict[str, int] = {"": 0}
        for chunk in chunks:
            if chunk.adapter not in taken:
                taken[chunk.adapter] = self._find(chunk.adapter).description.num_bytes
            if part and (self._alone or sum(taken.values()) > self._ready_bytes):
                yield part
                part, taken = [], {"": 0, chunk.adapter: taken[chunk.adapter]}
            part.append(chunk)
        yield part

    def _cut(self, chunks: Sequence[Chunk]) -> Segments:
        wanted = {chunk.adapter for chunk in chunks} - {""}
        sizes, adapters = [], []
        for digest, group in groupby(chunks, lambda chunk: chunk.adapter):
            sizes.append(sum(len(chunk.token_ids) for chunk in group))
            adapters.append(self._take(digest, wanted) if digest else None)
        return Segments(sizes, tuple(adapters))

    def _take(self, digest: str, wanted: set[str]) -> ReadyAdapter:
        """Has an adapter ready; others than the wanted ones make room."""
        with self._lock:
            ready = self._ready.pop(digest, None)
            if ready is not None:
                self._ready[digest] = ready
                return ready
        loaded = self._find(digest)
        with self._lock:
            for other in [each for each in self._ready if each not in wanted]:
                if self._free_bytes() >= loaded.description.num_bytes:
                    break
                del self._ready[other]
            # No load beside this may take the room.
            self._being_bound = loaded.description.num_bytes
        ready = self._bind(loaded.files)
        with self._lock:
            self._being_bound = 0
            self._ready[digest] = ready
        return ready

    def _find(self, digest: str) -> LoadedAdapter:
        with self._lock:
            found = self._loaded.get(digest)
        if found is None:
            raise Internal(f"adapter {digest} is not loaded")
        return found

    def _free_bytes(self) -> int:
        taken = sum(each.num_bytes for each in self._ready.values())
        return self._ready_bytes - taken - self._being_bound

    def _check(self, files: AdapterFiles) -> None:
        """Raises InvalidArgument for an adapter of another model than this."""
        for name, (down, up, _) in files.layers.items():
            place = self._places.get(name)
            if place is None:
                raise refused(
                    files.name, f"the model has no {name[:120]} to which a step's rows are given"
                )
            own, wanted = (len(up), down.shape[1]), (place.outputs, place.inputs)
            if own != wanted:
                text = f"its matrices for {name} fit {own[0]} x {own[1]}, and the model's layer is "
                raise refused(files.name, f"{text}{wanted[0]} x {wanted[1]}")
        for target in files.targets:
            meant = [name for name in self._places if f".{name}".endswith(f".{target}")]
            lacking = [name for name in meant if name not in files.layers]
            if not meant:
                raise refused(files.name, f"its target module {target[:60]} is not there")
            if lacking:
                raise refused(files.name, f"it lacks matrices for {lacking[0]}, one of its targets")

    def _bind(self, files: AdapterFiles) -> ReadyAdapter:
        """Raises NotExact."""
        parts: list[list[tuple[Place, torch.Tensor, torch.Tensor]]] = [[] for _ in self._layers]
        for name, matrices in files.layers.items():
            place = self._places[name]
            down, up = (each.to(self._device, self._dtype) for each in _scaled(matrices))
            parts[place.layer].append((place, down, up))
        additions: list[Addition | None] = []
        num_bytes = 0
        for own in parts:
            own.sort(key=lambda part: part[0].first)
            num_bytes += sum(down.nbytes + up.nbytes for _, down, up in own)
            additions.append(self._addition(own) if own else None)
        return ReadyAdapter(tuple(additions), num_bytes)

    def _addition(self, parts: list[tuple[Place, torch.Tensor, torch.Tensor]]) -> Addition:
        bind = self._chooser.bind
        ups = (Up(place.first, place.outputs, bind(up, None)) for place, _, up in parts)
        down = torch.cat([down for _, down, _ in parts])
        return Addition(bind(down, None), [len(down) for _, down, _ in parts], tuple(ups))

    def _adds(self, index: int) -> Callable[..., None]:
        """A hook that adds to a layer's output."""

        def add(_layer: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> None:
            sizes, adapters = self._segments
            if not sizes:
                return
            rows = given[0].reshape(-1, given[0].shape[-1])
            if self._alone:
                # One chunk, of which a part is computed.
                sizes = [len(rows)]
            # What is behind the step's rows is padding.
            sizes = [*sizes, len(rows) - sum(sizes)]
            whole = torch.split(output.view(len(rows), -1), sizes)
            for adapter, x, y in zip(adapters, torch.split(rows, sizes), whole, strict=False):
                addition = None if adapter is None else adapter.additions[index]
                if addition is None:
                    continue
                inner = addition.down(x)
                ups = addition.ups
                # In the form in which products were proven.
                each = [part.contiguous() for part in torch.split(inner, addition.ranks, 1)]
                for (first, outputs, up), part in zip(ups, each, strict=True):
                    y.narrow(1, first, outputs).add_(up(part))

        return add


def _scaled(matrices: Matrices) -> tuple[torch.Tensor, torch.Tensor]:
    """Down [rank, inputs] and up [outputs, rank], which has the factor, in float32."""
    padding = -matrices.rank % _RANKS
    down = F.pad(matrices.down.float(), (0, 0, 0, padding))
    return down, F.pad(matrices.up.float() * matrices.scale, (0, padding))


def _rows(chunks: Sequence[Chunk], order: Sequence[int]) -> list[int]:
    """Of logits whose chunks were computed in an order, the row of each in the plan's order."""
    starts, row = [0] * len(chunks), 0
    for index in order:
        starts[index], row = row, row + len(chunks[index].wanted)
    return [
        start + i
        for start, chunk in zip(starts, chunks, strict=True)
        for i in range(len(chunk.wanted))
    ]


def find_places(
    network: nn.Module, run: Callable[[], object]
) -> tuple[list[nn.Module], dict[str, Place]]:
    """The layers to whose outputs adapters can add, and which of transformers' layers they compute,
    by name. Those that `run` calls once, with every row of the step: an output layer gets fewer,
    and an expert those of its own."""
    parts = list(_linear_parts(network))
    layers = {id(part.module): part.module for part in parts}
    seen: dict[int, list[bool]] = {key: [] for key in layers}
    rows = 0

    def begin(_network: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal rows
        rows = (named["input_ids"] if named else given[0].token_ids).numel()

    def note(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        whole = bool(given) and isinstance(output, torch.Tensor)
        seen[id(layer)].append(
            whole and given[0].numel() == rows * given[0].shape[-1]
            and output.numel() == rows * output.shape[-1]
        )  # fmt: skip

    hooks = [network.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [layer.register_forward_hook(note) for layer in layers.values()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found = [layer for key, layer in layers.items() if seen[key] == [True]]
    index = {id(layer): i for i, layer in enumerate(found)}
    places = {
        part.name: Place(index[id(part.module)], _inputs(part.module), part.first, part.outputs)
        for part in parts
        if id(part.module) in index
    }
    return found, places


def _linear_parts(network: nn.Module) -> Iterator[LinearPart]:
    if isinstance(network, Decoder):
        yield from network.linear_parts()
        return
    for name, module in network.named_modules():
        if isinstance(module, Conv1D):
            yield LinearPart(name, module, 0, int(module.nf))
        elif isinstance(module, _LINEAR):
            yield LinearPart(name, module, 0, int(module.out_features))


def _inputs(layer: Any) -> int:
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)
