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
from types import ModuleType

import numpy as np
import torch

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import KvPayload, in_host
from batonlm.engine.config import TILE
from batonlm.engine.device import settle
from batonlm.engine.kv.extents import check_extents, spans

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


def is_lossless(stored: str, wire: str) -> bool:
    """Whether numbers kept as `stored` are all the same after a journey as `wire`."""
    return wire in (stored, "float32")


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


KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Of some positions, both [layers, positions, heads, size]."""


def as_tensor(layout: KvLayout, count: int, payload: KvPayload) -> torch.Tensor:
    """The payload of `count` positions, flat, sharing its memory. Raises Internal for one of
    another size."""
    if count <= 0 or payload.nbytes != count * layout.bytes_per_position:
        raise Internal("the payload's size does not fit its positions")
    dtype = DTYPES[layout.dtype]
    if isinstance(payload, torch.Tensor):
        return payload.view(dtype)
    return torch.frombuffer(in_host(payload), dtype=dtype)


def keys_and_values(layout: KvLayout, count: int, wire: torch.Tensor) -> KeysAndValues:
    """Both as views of a flat payload of `count` positions."""
    by_layer = wire.view(layout.num_layers, -1)
    split = count * layout.num_kv_heads * layout.key_size
    shape = (layout.num_layers, count, layout.num_kv_heads)
    keys, values = by_layer[:, :split], by_layer[:, split:]
    return keys.view(*shape, layout.key_size), values.view(*shape, layout.value_size)


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
        self._read(extents, first_position, count, as_tensor(self.layout, count, out))

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        """A read-only payload is copied once more."""
        if isinstance(payload, memoryview) and payload.readonly:
            payload = memoryview(bytearray(payload))
        self._fill(extents, first_position, count, as_tensor(self.layout, count, payload))

    @abstractmethod
    def _read(self, extents: Extents, first: int, count: int, wire: torch.Tensor) -> None: ...

    @abstractmethod
    def _fill(self, extents: Extents, first: int, count: int, wire: torch.Tensor) -> None: ...


class KvCache(KvMemory):
    """Head-major: what one head reads for an extent is one contiguous run, which the CPU's kernel
    takes without a copy.

    keys: [layers, heads, places, key_size]; values: [layers, heads, places, stored], where stored
    is max(value_size, key_size) if `even` (kernels that need equal sizes), else value_size; of
    latents it is 0, and attention reads keys as values. dtype: of both; None is the wire's.

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
        self.keys = torch.zeros((*shape, layout.key_size), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, stored), dtype=dtype, device=device)
        self.device = self.keys.device
        self.block_bytes = (self.keys.nbytes + self.values.nbytes) // num_blocks

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys [heads, T, key_size] and values [heads, T, value_size] to places [T] (int64)."""
        self.keys[layer].index_copy_(1, places, keys)
        if size := self.layout.value_size:
            self.values[layer].narrow(-1, 0, size).index_copy_(1, places, values)

    def clear(self, places: torch.Tensor) -> None:
        """Zeros places [N] (int64) in all layers."""
        self.keys.index_fill_(2, places, 0)
        self.values.index_fill_(2, places, 0)

    def copy(self, copy: BlockCopy) -> None:
        """Copies the start of a block and zeros the rest of its last tile."""
        source, target = copy.source * self.block_size, copy.target * self.block_size
        count = copy.num_positions
        for memory in (self.keys, self.values):
            memory.narrow(2, target, count).copy_(memory.narrow(2, source, count))
            memory.narrow(2, target + count, -count % TILE).zero_()

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None:
        for raw, stored in self._by_block(first, count, out):
            raw.copy_(stored)

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None:
        for given, stored in self._by_block(first, count, raw):
            stored.copy_(given)

    def transfer(
        self, extents: Extents, first_position: int, wire: KeysAndValues, *, packing: bool
    ) -> None:
        """Writes KV of the positions from first_position on into wire; or, unless packing, takes it
        from there. wire: of any strides and in the wire's number type."""
        done = start = length = 0
        count = wire[0].shape[1]
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        for start, length in spans(extents, first_position, count, self.block_size):
            for part, memory in zip(wire, (self.keys, self.values), strict=True):
                stored = memory.narrow(2, start, length).narrow(-1, 0, part.shape[-1])
                here, there = stored.transpose(1, 2), part.narrow(1, done, length)
                source, target = (here, there) if packing else (there, here)
                target.copy_(converted(source, target.dtype))
            done += length
        for memory in () if packing else (self.keys, self.values):
            memory.narrow(2, start + length, -(first_position + count) % TILE).zero_()

    def _read(self, extents: Extents, first: int, count: int, wire: torch.Tensor) -> None:
        parts = keys_and_values(self.layout, count, wire)
        self.transfer(extents, first, parts, packing=True)

    def _fill(self, extents: Extents, first: int, count: int, wire: torch.Tensor) -> None:
        parts = keys_and_values(self.layout, count, wire)
        self.transfer(extents, first, parts, packing=False)

    def _by_block(
        self, first: int, count: int, raw: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For keys and values: a part of every raw row, and its place in memory, both as
        [count, layers, heads, block_size, size]."""
        done = 0
        for memory in (self.keys, self.values):
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
    element]: what one head reads of a block is one run too.

    keys: [num_blocks + 1, layers, kv_heads, block_size, key_size]; values: the same with
    value_size. Both are views of `storage`, [num_blocks + 1, elements of a block], of type dtype;
    None is the wire's.

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
        size = layers * places * (layout.key_size + layout.value_size)
        dtype = dtype or DTYPES[layout.dtype]
        self.storage = torch.zeros(num_blocks + 1, size, dtype=dtype, device=device)
        self.device = self.storage.device
        self.block_bytes = size * dtype.itemsize
        by_layer = self.storage.view(num_blocks + 1, layers, -1)
        split = places * layout.key_size
        shape = (num_blocks + 1, layers, heads, block_size)
        self.keys = by_layer[:, :, :split].view(*shape, layout.key_size)
        self.values = by_layer[:, :, split:].view(*shape, layout.value_size)
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
        own_keys[blocks, :, offsets] = keys.transpose(0, 1)
        if self.layout.value_size:
            own_values[blocks, :, offsets] = values.transpose(0, 1)

    def copy(self, copy: BlockCopy) -> None:
        """Copies a block. What lies after its first num_positions comes along and means nothing."""
        self.storage[copy.target].copy_(self.storage[copy.source])

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None:
        """When out is pinned, this only enqueues the copy on the current stream."""
        out.copy_(self._bytes(first, count), non_blocking=out.is_pinned())

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None:
        """A pinned raw must stay as it is until the copy is done."""
        self._bytes(first, count).copy_(raw, non_blocking=raw.is_pinned())

    def gather(
        self, extents: Extents, first_position: int, count: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """KV of positions in the wire's layout and dtype, flat and on the cache's device.

        out: where it is written, in the dtype that is stored, by one kernel; None: in new memory.

        Enqueued on the current stream; the steps that wrote these positions are done.
        """
        places = self._places(extents, first_position, count)
        wire_dtype = DTYPES[self.layout.dtype]
        elements = count * self.layout.bytes_per_position // wire_dtype.itemsize
        numbers = self.storage.new_empty(elements) if out is None else out
        if self._kernels is not None:
            self._kernels.transfer(self.keys, self.values, places, numbers, packing=True)
            return converted(numbers, wire_dtype)
        parts = keys_and_values(self.layout, count, numbers)
        for part, memory in zip(parts, (self.keys, self.values), strict=True):
            found = memory[places // self.block_size, :, :, places % self.block_size]
            part.copy_(found.transpose(0, 1))
        return converted(numbers, wire_dtype)

    def scatter(
        self, extents: Extents, first_position: int, count: int, wire: torch.Tensor
    ) -> None:
        """The inverse of gather; wire must stay as it is until the current stream is through."""
        places = self._places(extents, first_position, count)
        numbers = converted(wire, self.storage.dtype)
        if self._kernels is not None:
            self._kernels.transfer(self.keys, self.values, places, numbers, packing=False)
            return
        parts = keys_and_values(self.layout, count, numbers)
        for part, memory in zip(parts, (self.keys, self.values), strict=True):
            rows = part.transpose(0, 1)
            memory[places // self.block_size, :, :, places % self.block_size] = rows

    def _read(self, extents: Extents, first: int, count: int, wire: torch.Tensor) -> None:
        with self._apart():
            direct = wire.device == self.device and wire.dtype == self.storage.dtype
            found = self.gather(extents, first, count, wire if direct else None)
            if not direct:
                wire.copy_(found, non_blocking=wire.is_pinned())
            settle(self.device)

    def _fill(self, extents: Extents, first: int, count: int, wire: torch.Tensor) -> None:
        with self._apart():
            there = wire.to(self.device, non_blocking=wire.is_pinned())
            self.scatter(extents, first, count, there)
            settle(self.device)

    def _apart(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bytes(self, first: int, count: int) -> torch.Tensor:
        return self.storage.narrow(0, first, count).view(torch.uint8)

    def _places(self, extents: Extents, first_position: int, count: int) -> torch.Tensor:
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        found = places_of(block_ids(extents), first_position, count, self.block_size)
        return torch.from_numpy(found).to(self.device)
