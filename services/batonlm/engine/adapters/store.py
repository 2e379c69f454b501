"""The adapters of a runner: kept within two bounds of memory, and added to the rows that want them.

All loaded adapters are in host memory as they are stored. Those that steps compute with are ready
on the device, in the form that is fastest there; the least recently used make room, and a step that
wants more than fit is computed in parts. Base layers stay what they are, quantised or not: a hook
behind each adds to its output.

A step's chunks are computed in the order of their adapters, so that an adapter's rows lie side by
side. What is added to them is computed by `additions`, and on GPUs by `grouped`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from batonlm.core.errors import Internal, NotFound, Overloaded
from batonlm.core.request.model import AdapterDescription
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.adapters.additions import Additions, SlicedAdditions
from batonlm.engine.adapters.files import AdapterFiles, Matrices, read_adapter, refused
from batonlm.engine.adapters.places import Part, find_places
from batonlm.engine.attention.backends import runs_triton
from batonlm.engine.attention.interface import ForwardPass
from batonlm.engine.config import EngineConfig
from batonlm.engine.device import upload
from batonlm.engine.exact import NotExact
from batonlm.engine.memory import size

log = logging.getLogger(__name__)

_RANKS = 8
"""Ranks are padded to a multiple of so many, so that there are few shapes to time and prove."""


@dataclass(frozen=True, slots=True)
class ReadyAdapter:
    """An adapter that steps can compute with."""

    bound: Any
    """What `Additions.bind` made of it."""
    num_bytes: int


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
        layers, self._places = find_places(network, run)
        self._num_layers = len(layers)
        self._additions: Additions
        if runs_triton(config.attention, device) and not alone:
            # Machines without a GPU need not have Triton.
            from batonlm.engine.adapters.grouped import GroupedAdditions

            self._additions = GroupedAdditions(
                self._places.values(), device, dtype, exact=exact, max_batch=config.max_batch
            )
        else:
            self._additions = SlicedAdditions(exact=exact, max_batch=config.max_batch, alone=alone)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._adds(index))
        self._adding = False
        """Whether a step is computed to which adapters add."""
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
        """Logits [wanted rows, vocab] of a plan. They hold until the next call. compute: the same
        by the network, of whichever chunks. Raises Internal for an adapter that is not loaded."""
        chunks = plan.chunks
        order = list(range(len(chunks)))
        if not self._alone:
            order.sort(key=lambda index: chunks[index].adapter)
        parts = list(self._parts([chunks[index] for index in order]))
        found = []
        for part in parts:
            self._begin(part)
            try:
                computed = compute(replace(plan, chunks=tuple(part)))
            finally:
                self._end()
            found.append(computed if len(parts) == 1 else computed.clone())
        logits = found[0] if len(found) == 1 else torch.cat(found)
        if order == sorted(order):
            return logits
        return logits.index_select(0, upload(_rows(chunks, order), torch.int64, logits.device))

    def as_recorded(
        self, forward: Callable[[ForwardPass], torch.Tensor]
    ) -> Callable[[ForwardPass], torch.Tensor] | None:
        """`forward` for steps that are recorded now: replayed within `forward` of this, they add
        what the adapters of that step do. None where nothing can be recorded."""
        begin = self._additions.recording()
        if begin is None:
            return None

        def run(inputs: ForwardPass) -> torch.Tensor:
            begin(inputs.token_ids.numel())
            self._adding = True
            try:
                return forward(inputs)
            finally:
                self._end()

        return run

    def _parts(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Chunks in order, as many at a time as there is room for their adapters."""
        part: list[Chunk] = []
        taken: dict[str, int] = {"": 0}
        for chunk in chunks:
            if chunk.adapter not in taken:
                taken[chunk.adapter] = self._find(chunk.adapter).description.num_bytes
            full = sum(taken.values()) > self._ready_bytes
            full = full or len(taken) - 1 > self._additions.most_adapters
            if part and (self._alone or full):
                yield part
                part, taken = [], {"": 0, chunk.adapter: taken[chunk.adapter]}
            part.append(chunk)
        yield part

    def _begin(self, chunks: Sequence[Chunk]) -> None:
        wanted = {chunk.adapter for chunk in chunks} - {""}
        sizes, adapters = [], []
        for digest, group in groupby(chunks, lambda chunk: chunk.adapter):
            sizes.append(sum(len(chunk.token_ids) for chunk in group))
            adapters.append(self._take(digest, wanted).bound if digest else None)
        self._additions.begin(sizes, adapters)
        self._adding = True

    def _end(self) -> None:
        self._adding = False
        self._additions.end()

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
        layers: list[list[Part]] = [[] for _ in range(self._num_layers)]
        for name, matrices in files.layers.items():
            place = self._places[name]
            down, up = (each.to(self._device, self._dtype) for each in _scaled(matrices))
            layers[place.layer].append(Part(place, down, up))
        for own in layers:
            own.sort(key=lambda part: part.place.first)
        num_bytes = sum(part.down.nbytes + part.up.nbytes for own in layers for part in own)
        return ReadyAdapter(self._additions.bind(layers), num_bytes)

    def _adds(self, index: int) -> Callable[..., None]:
        """A hook that adds to a layer's output."""

        def add(_layer: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> None:
            if self._adding:
                rows = given[0].reshape(-1, given[0].shape[-1])
                self._additions.add(index, rows, output.view(len(rows), -1))

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
