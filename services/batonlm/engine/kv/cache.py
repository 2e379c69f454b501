"""The block pool's memory, and the payload of a KV chunk that is packed from it.

There are two layouts: `KvCache`, head-major, for CPUs and for plain torch on any device, and
`BlockCache`, block-major, for Triton kernels on a GPU. The payload is position-major,
[layer][k, v][position][head][element], whatever the memory's layout is: packing and unpacking
permute, and convert numbers to the wire's type and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.model import SCALED, SCALED_FP8, SCALED_INT8, KvLayout
from batonlm.core.scheduler.plan import KvPayload, in_host
from batonlm.engine.config import TILE
from batonlm.engine.device import settle
from batonlm.engine.kv import scaled
from batonlm.engine.kv.extents import check_extents, spans

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    SCALED_INT8: torch.int8,
    SCALED_FP8: torch.uint8,
}
"""How torch holds numbers of each type: those with scales as codes."""


def is_lossless(stored: str, wire: str) -> bool:
    """Whether what was computed on KV kept as `stored` goes on the same after a journey as `wire`.

    Another wire than its own would bring scaled numbers unchanged to a pool that computes on with
    numbers of another type.
    """
    return wire == stored or (wire == "float32" and stored not in SCALED)


def converted(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of another type: what lies outside its range becomes its largest finite
    number, as infinities do, and NaN stays. Numbers of that type are returned as they are."""
    if numbers.dtype == dtype:
        return numbers
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(numbers.dtype).max:
        # In float32, because the limit may not be a number of the narrow type that they come in.
        numbers = numbers.float().clamp(-largest, largest)
    return numbers.to(dtype)


Parts = tuple[torch.Tensor, ...]
"""Keys and values of some positions, both [layers, positions, heads, size]; of codes, the scales of
each follow, of the same type, [layers, positions, heads, 1]."""


def recoded(parts: Parts, dtype: torch.dtype) -> Parts:
    """The nearest numbers as torch holds them in another type, see `DTYPES`. Those of that type are
    returned as they are."""
    if parts[0].dtype == dtype:
        return parts
    if parts[0].dtype in scaled.LARGEST:
        parts = tuple(scaled.widened(*pair) for pair in zip(parts[:2], parts[2:], strict=True))
    if dtype in scaled.LARGEST:
        (keys, key_scales), (values, value_scales) = (scaled.narrowed(p, dtype) for p in parts)
        return keys, values, key_scales, value_scales
    return tuple(converted(part, dtype) for part in parts)


def as_tensor(layout: KvLayout, count: int, payload: KvPayload) -> torch.Tensor:
    """The payload of `count` positions, flat, sharing its memory. Raises Internal for one of
    another size."""
    if count <= 0 or payload.nbytes != count * layout.bytes_per_position:
        raise Internal("the payload's size does not fit its positions")
    dtype = DTYPES[layout.dtype]
    if isinstance(payload, torch.Tensor):
        return payload.view(dtype)
    return torch.frombuffer(in_host(payload), dtype=dtype)


def part_sizes(layout: KvLayout, dtype: torch.dtype) -> tuple[int, ...]:
    """The last dimension of each of a layout's Parts, held as dtype."""
    sizes = layout.key_size, layout.value_size
    return (*sizes, 1, min(1, layout.value_size)) if dtype in scaled.LARGEST else sizes


class Heads(NamedTuple):
    """Which heads of a payload a memory has."""

    first: int
    """The first of them."""
    of: int
    """How many the payload has."""


def parts_of(layout: KvLayout, count: int, flat: torch.Tensor, among: Heads | None = None) -> Parts:
    """Views of a flat payload of `count` positions, in the type in which it is held. among: where
    the layout's heads are among those of the payload; None: it has no others."""
    if among is not None:
        whole = parts_of(replace(layout, num_kv_heads=among.of), count, flat)
        return tuple(part.narrow(2, among.first, layout.num_kv_heads) for part in whole)
    layers, heads = layout.num_layers, layout.num_kv_heads
    sizes = part_sizes(layout, flat.dtype)
    pieces = torch.split(flat.view(layers, -1), [count * heads * size for size in sizes], 1)
    return tuple(
        piece.view(layers, count, heads, size) for piece, size in zip(pieces, sizes, strict=True)
    )


class KvMemory(ABC):
    """The block pool's memory in one layout.

    `pack` and `unpack` are those of ModelRunner. `blocks_out` and `blocks_in` move whole blocks
    raw: out and raw are uint8 [count, block_bytes] on the host, rows in the order of the blocks,
    and what a row means is the layout's own. On a GPU, copies may be left to the current stream.
    """

    device: torch.device
    block_bytes: int
    """Of one block as stored, which may be more than on the wire."""

    def __init__(self, layout: KvLayout, num_blocks: int, block_size: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size

    @abstractmethod
    def copy(self, copy: BlockCopy) -> None: ...

    @abstractmethod
    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None: ...

    @abstractmethod
    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None: ...

    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        """Fastest when `out` is in the memory's device; in the host, when it is pinned."""
        wire = as_tensor(self.layout, count, out)
        self.transfer(extents, first_position, count, wire, packing=True)

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        """A read-only payload is copied once more."""
        if isinstance(payload, memoryview) and payload.readonly:
            payload = memoryview(bytearray(payload))
        wire = as_tensor(self.layout, count, payload)
        self.transfer(extents, first_position, count, wire, packing=False)

    @abstractmethod
    def transfer(
        self,
        extents: Extents,
        first_position: int,
        count: int,
        wire: torch.Tensor,
        among: Heads | None = None,
        *,
        packing: bool,
    ) -> None:
        """Writes KV of the positions into wire; or, unless packing, takes it from there. Returns
        when that is done. wire: flat, of this memory's layers. among: see `parts_of`."""


class KvCache(KvMemory):
    """Head-major: what one head reads for an extent is one contiguous run, which the CPU's kernel
    takes without a copy.

    keys: [layers, heads, places, key_size]; values: [layers, heads, places, stored], where stored
    is max(value_size, key_size) if `even` (kernels that need equal sizes), else value_size; of
    latents it is 0, and attention reads keys as values. dtype: of both; None is the wire's. scales:
    none, or of codes those of keys and values, [layers, heads, places, 1].

    Invariant: within a tile of 16 places, those after the last written one hold zeros. Attention
    reads whole tiles and masks what lies ahead; zeros keep a former owner's infinities out of that
    mask.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        even: bool = False,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layout, num_blocks, block_size)
        stored = layout.value_size
        if even and stored:
            stored = max(stored, layout.key_size)
        shape = (layout.num_layers, layout.num_kv_heads, num_blocks * block_size)
        dtype = dtype or DTYPES[layout.dtype]
        self.keys, self.values, *scales = self._parts = tuple(
            torch.zeros((*shape, size), dtype=dtype, device=device)
            for size in (layout.key_size, stored, *part_sizes(layout, dtype)[2:])
        )
        self.scales = tuple(scales)
        self.device = self.keys.device
        self.block_bytes = sum(part.nbytes for part in self._parts) // num_blocks

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys [heads, T, key_size] and values [heads, T, value_size] to places [T] (int64)."""
        # Of latents, no values are kept.
        given = keys, values[..., : self.layout.value_size]
        for memory, part in zip(self._parts, recoded(given, self.keys.dtype), strict=True):
            memory[layer].narrow(-1, 0, part.shape[-1]).index_copy_(1, places, part)

    def numbers(
        self, layer: int, places: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys [heads, N, key_size] and values [heads, N, stored] of places [N] (int64),
        as a copy in numbers of a float type."""
        found = tuple(part[layer].index_select(1, places) for part in self._parts)
        keys, values = recoded(found, dtype)
        return keys, values

    def clear(self, places: torch.Tensor) -> None:
        """Zeros places [N] (int64) in all layers."""
        for part in self._parts:
            part.index_fill_(2, places, 0)

    def copy(self, copy: BlockCopy) -> None:
        """Copies the start of a block and zeros the rest of its last tile."""
        source, target = copy.source * self.block_size, copy.target * self.block_size
        count = copy.num_positions
        for memory in self._parts:
            memory.narrow(2, target, count).copy_(memory.narrow(2, source, count))
            memory.narrow(2, target + count, -count % TILE).zero_()

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None:
        for raw, stored in self._by_block(first, count, out):
            raw.copy_(stored)

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None:
        for given, stored in self._by_block(first, count, raw):
            stored.copy_(given)

    def transfer(
        self,
        extents: Extents,
        first_position: int,
        count: int,
        wire: torch.Tensor,
        among: Heads | None = None,
        *,
        packing: bool,
    ) -> None:
        sizes = part_sizes(self.layout, self.keys.dtype)
        parts = parts_of(self.layout, count, wire, among)
        done = start = length = 0
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        for start, length in spans(extents, first_position, count, self.block_size):
            there = tuple(part.narrow(1, done, length) for part in parts)
            here = tuple(
                memory.narrow(2, start, length).narrow(-1, 0, size).transpose(1, 2)
                for memory, size in zip(self._parts, sizes, strict=True)
            )
            source, target = (here, there) if packing else (there, here)
            for given, taken in zip(recoded(source, target[0].dtype), target, strict=True):
                taken.copy_(given)
            done += length
        for memory in () if packing else self._parts:
            memory.narrow(2, start + length, -(first_position + count) % TILE).zero_()
        settle(self.device)

    def _by_block(
        self, first: int, count: int, raw: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For keys, values and their scales: a part of every raw row, and its place in memory, both
        as [count, layers, heads, block_size, size]."""
        done = 0
        for memory in self._parts:
            layers, heads, _, size = memory.shape
            shape = (layers, heads, count, self.block_size, size)
            places = memory.narrow(2, first * self.block_size, count * self.block_size)
            stored = places.view(shape).permute(2, 0, 1, 3, 4)
            row = memory.nbytes // self.num_blocks
            yield raw[:, done : done + row].view(memory.dtype).view(stored.shape), stored
            done += row


def block_ids(extents: Extents) -> np.ndarray:
    """The blocks of extents in position order, int32."""
    runs = [np.arange(first, first + count, dtype=np.int32) for first, count in extents]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)


def places_of(table: np.ndarray, first_position: int, count: int, block_size: int) -> np.ndarray:
    """Where positions lie, int32 [count]; table: the sequence's block ids."""
    positions = np.arange(first_position, first_position + count, dtype=np.int32)
    return table[positions // block_size] * np.int32(block_size) + positions % block_size


class BlockCache(KvMemory):
    """Block-major: all KV of a block, over all layers, is one run of memory, so that moving a block
    is one copy. In it lie, layer by layer, the keys and then the values, each [head, offset,
    element]: what one head reads of a block is one run too. Of codes the scales of
    keys and then those of values follow in their layer, each [head, offset], where kernels find
    them.

    keys: [num_blocks + 1, layers, kv_heads, block_size, key_size]; values: the same with
    value_size; scales: none, or two with size 1. All are views of `storage`, [num_blocks + 1,
    elements of a block], of type dtype; None is the wire's.

    Attention reads only positions that were written, so no memory is ever cleared. One block more
    than the pool has, `trash_block`, takes what padding rows of a batch write.

    kernels: whether Triton's copy; None is where there is a GPU. Without them plain torch does the
    same: there this layout is tested, and not fast.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        kernels: bool | None = None,
    ):
        super().__init__(layout, num_blocks, block_size)
        self.trash_block = num_blocks
        layers, heads = layout.num_layers, layout.num_kv_heads
        places = heads * block_size
        dtype = dtype or DTYPES[layout.dtype]
        sizes = part_sizes(layout, dtype)
        size = layers * places * sum(sizes)
        self.storage = torch.zeros(num_blocks + 1, size, dtype=dtype, device=device)
        self.device = self.storage.device
        self.block_bytes = size * dtype.itemsize
        by_layer = self.storage.view(num_blocks + 1, layers, -1)
        pieces = torch.split(by_layer, [places * size for size in sizes], 2)
        self._parts = tuple(
            piece.view(num_blocks + 1, layers, heads, block_size, size)
            for piece, size in zip(pieces, sizes, strict=True)
        )
        self.keys, self.values, *scales = self._parts
        self.scales = tuple(scales)
        self._layers = [(self.keys[:, i], self.values[:, i]) for i in range(layers)]
        # Hand-overs must not wait for steps that are under way, which have other blocks.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kernels: ModuleType | None = None
        if device.type == "cuda" if kernels is None else kernels:
            # Machines without a GPU need not have Triton.
            from batonlm.engine.attention.triton import copies

            self._kernels = copies

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [num_blocks + 1, kv_heads, block_size, size]."""
        return self._layers[layer]

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys [kv_heads, T, key_size] and values [kv_heads, T, value_size], their last dimension
        contiguous, to places [T] (int32)."""
        own_keys, own_values = self._layers[layer]
        if self._kernels is not None:
            self._kernels.write(keys, values, places, own_keys, own_values)
            return
        blocks, offsets = places // self.block_size, places % self.block_size
        given = keys, values[..., : self.layout.value_size]
        for memory, part in zip(self._parts, recoded(given, self.keys.dtype), strict=True):
            memory[blocks, layer, :, offsets] = part.transpose(0, 1)

    def copy(self, copy: BlockCopy) -> None:
        """Copies a block. What lies after its first num_positions comes along and means nothing."""
        self.storage[copy.target].copy_(self.storage[copy.source])

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None:
        """When out is pinned, this only enqueues the copy on the current stream."""
        out.copy_(self._bytes(first, count), non_blocking=out.is_pinned())

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None:
        """A pinned raw must stay as it is until the copy is done."""
        self._bytes(first, count).copy_(raw, non_blocking=raw.is_pinned())

    def gather(self, extents: Extents, first_position: int, count: int) -> torch.Tensor:
        """KV of positions in the wire's layout and dtype, flat and on the cache's device.

        Enqueued on the current stream; the steps that wrote these positions are done.
        """
        elements = self.storage.shape[1] // self.block_size
        numbers = self.storage.new_empty(count * elements)
        self._move(extents, first_position, count, numbers, packing=True)
        return self._recoded(count, numbers, DTYPES[self.layout.dtype])

    def scatter(
        self, extents: Extents, first_position: int, count: int, wire: torch.Tensor
    ) -> None:
        """The inverse of gather; wire must stay as it is until the current stream is through."""
        numbers = self._recoded(count, wire, self.storage.dtype)
        self._move(extents, first_position, count, numbers, packing=False)

    def transfer(
        self,
        extents: Extents,
        first_position: int,
        count: int,
        wire: torch.Tensor,
        among: Heads | None = None,
        *,
        packing: bool,
    ) -> None:
        """By one kernel where wire is on the device and in the type of this memory. Else what is
        one head's or several of a wire's crosses in one piece, and is spread out there."""
        layout = self.layout
        with self._apart():
            if wire.device == self.device and wire.dtype == self.storage.dtype:
                self._move(extents, first_position, count, wire, among, packing=packing)
            elif packing:
                found = self.gather(extents, first_position, count)
                if among is None:
                    wire.copy_(found, non_blocking=wire.is_pinned())
                else:
                    _copy(
                        parts_of(layout, count, found.to(wire.device)),
                        parts_of(layout, count, wire, among),
                    )
            else:
                own = wire
                if among is not None:
                    own = wire.new_empty(wire.numel() // among.of * layout.num_kv_heads)
                    _copy(parts_of(layout, count, wire, among), parts_of(layout, count, own))
                there = own.to(self.device, non_blocking=own.is_pinned())
                self.scatter(extents, first_position, count, there)
            settle(self.device)

    def _move(
        self,
        extents: Extents,
        first_position: int,
        count: int,
        numbers: torch.Tensor,
        among: Heads | None = None,
        *,
        packing: bool,
    ) -> None:
        """As `transfer`, on the current stream. numbers: on the device, in this memory's type."""
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        found = places_of(block_ids(extents), first_position, count, self.block_size)
        places = torch.from_numpy(found).to(self.device)
        if self._kernels is not None:
            self._kernels.transfer(self.keys, self.values, places, numbers, among, packing=packing)
            return
        blocks, offsets = places // self.block_size, places % self.block_size
        parts = parts_of(self.layout, count, numbers, among)
        for part, memory in zip(parts, self._parts, strict=True):
            if packing:
                part.copy_(memory[blocks, :, :, offsets].transpose(0, 1))
            else:
                memory[blocks, :, :, offsets] = part.transpose(0, 1)

    def _recoded(self, count: int, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A flat payload, held in another type."""
        if flat.dtype == dtype:
            return flat
        layout = self.layout
        elements = count * layout.num_layers * layout.num_kv_heads * sum(part_sizes(layout, dtype))
        target = flat.new_empty(elements, dtype=dtype)
        given = recoded(parts_of(layout, count, flat), dtype)
        for part, taken in zip(given, parts_of(layout, count, target), strict=True):
            taken.copy_(part)
        return target

    def _apart(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bytes(self, first: int, count: int) -> torch.Tensor:
        return self.storage.narrow(0, first, count).view(torch.uint8)


def _copy(given: Parts, taken: Parts) -> None:
    for source, target in zip(given, taken, strict=True):
        target.copy_(source)
