"""The block pool's memory, and the payload of a KV chunk that is packed from it.

There are two layouts: `KvCache`, head-major, for CPUs and for plain torch on any device, and
`BlockCache`, block-major, for Triton kernels on a GPU. The payload is position-major,
[layer][k, v][position][head][element], whatever the memory's layout is: packing and unpacking
permute, and convert numbers to the wire's type and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from baton.core.errors import Internal
from baton.core.kvcache.block_pool import BlockCopy, Extents
from baton.core.request.model import KvLayout
from baton.engine.config import TILE
from baton.engine.kv.extents import check_extents, spans

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


def as_tensor(layout: KvLayout, count: int, payload: memoryview) -> torch.Tensor:
    """The payload of `count` positions, flat, sharing its memory. Raises Internal for one of
    another size."""
    if count <= 0 or payload.nbytes != count * layout.bytes_per_position:
        raise Internal("the payload's size does not fit its positions")
    return torch.frombuffer(payload, dtype=DTYPES[layout.dtype])


def keys_and_values(layout: KvLayout, count: int, wire: torch.Tensor) -> KeysAndValues:
    """Both as views of a flat payload of `count` positions."""
    by_layer = wire.view(layout.num_layers, -1)
    split = count * layout.num_kv_heads * layout.key_size
    shape = (layout.num_layers, count, layout.num_kv_heads, -1)
    return by_layer[:, :split].view(shape), by_layer[:, split:].view(shape)


def of_heads(wire: KeysAndValues, first: int, count: int) -> KeysAndValues:
    """The part of some consecutive heads, as views."""
    return wire[0].narrow(2, first, count), wire[1].narrow(2, first, count)


class KvMemory(Protocol):
    """The block pool's memory in one layout.

    `pack` and `unpack` are those of ModelRunner. `blocks_out` and `blocks_in` move whole blocks
    raw: out and raw are uint8 [count, block_bytes] on the host, rows in the order of the blocks,
    and what a row means is the layout's own. On a GPU, copies may be left to the current stream.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def block_bytes(self) -> int: ...

    def copy(self, copy: BlockCopy) -> None: ...

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None: ...

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None: ...

    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None: ...

    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None: ...


class KvCache:
    """keys: [layers, heads, places, key_size]; values: [layers, heads, places, stored], where
    stored is max(value_size, key_size) if `even` (kernels that need equal sizes), else value_size.
    dtype: of both; None is the wire's.
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
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        places = num_blocks * block_size
        stored = max(layout.value_size, layout.key_size) if even else layout.value_size
        shape = (layout.num_layers, layout.num_kv_heads, places)
        dtype = dtype or DTYPES[layout.dtype]
        self.keys = torch.zeros((*shape, layout.key_size), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, stored), dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as stored, which may be more than on the wire."""
        return (self.keys.nbytes + self.values.nbytes) // self.num_blocks

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys [heads, T, key_size] and values [heads, T, value_size] to places [T] (int64)."""
        self.keys[layer].index_copy_(1, places, keys)
        self.values[layer].narrow(-1, 0, self.layout.value_size).index_copy_(1, places, values)

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
        """Copies whole blocks as stored into out, uint8 [count, block_bytes]."""
        for raw, stored in self._by_block(first, count, out):
            raw.copy_(stored)

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None:
        """The inverse of blocks_out."""
        for given, stored in self._by_block(first, count, raw):
            stored.copy_(given)

    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None:
        """See ModelRunner.pack."""
        self.read(extents, first_position, self._wire(count, out))

    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None:
        """See ModelRunner.unpack. A read-only payload is copied once more."""
        if payload.readonly:
            payload = memoryview(bytearray(payload))
        self.fill(extents, first_position, self._wire(count, payload))

    def read(self, extents: Extents, first_position: int, wire: KeysAndValues) -> None:
        """Writes KV of the positions from first_position on into wire: [layers, positions, heads,
        size], of any strides and in the wire's number type."""
        done, count = 0, wire[0].shape[1]
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        for start, length in spans(extents, first_position, count, self.block_size):
            for part, memory in zip(wire, (self.keys, self.values), strict=True):
                stored = memory.narrow(2, start, length).narrow(-1, 0, part.shape[-1])
                numbers = converted(stored, part.dtype)
                part.narrow(1, done, length).copy_(numbers.transpose(1, 2))
            done += length

    def fill(self, extents: Extents, first_position: int, wire: KeysAndValues) -> None:
        """The inverse of `read`."""
        done = start = length = 0
        count = wire[0].shape[1]
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        for start, length in spans(extents, first_position, count, self.block_size):
            for part, memory in zip(wire, (self.keys, self.values), strict=True):
                stored = memory.narrow(2, start, length).narrow(-1, 0, part.shape[-1])
                numbers = converted(part.narrow(1, done, length), stored.dtype)
                stored.copy_(numbers.transpose(1, 2))
            done += length
        for memory in (self.keys, self.values):
            memory.narrow(2, start + length, -(first_position + count) % TILE).zero_()

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

    def _wire(self, count: int, buffer: memoryview) -> KeysAndValues:
        """A payload's keys and values as views of its bytes."""
        return keys_and_values(self.layout, count, as_tensor(self.layout, count, buffer))


def block_ids(extents: Extents) -> np.ndarray:
    """The blocks of extents in position order, int32."""
    runs = [np.arange(first, first + count, dtype=np.int32) for first, count in extents]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)


def places_of(table: np.ndarray, first_position: int, count: int, block_size: int) -> np.ndarray:
    """Where positions lie, int32 [count]; table: the sequence's block ids."""
    positions = np.arange(first_position, first_position + count, dtype=np.int32)
    return table[positions // block_size] * np.int32(block_size) + positions % block_size


class BlockCache:
    """keys: [num_blocks + 1, layers, kv_heads, block_size, key_size]; values: the same with
    value_size. Both are views of `storage`, [num_blocks + 1, elements of a block], of type dtype;
    None is the wire's.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
    ):
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.trash_block = num_blocks
        layers, heads = layout.num_layers, layout.num_kv_heads
        places = heads * block_size
        size = layers * places * (layout.key_size + layout.value_size)
        self._wire_dtype = DTYPES[layout.dtype]
        dtype = dtype or self._wire_dtype
        self.storage = torch.zeros(num_blocks + 1, size, dtype=dtype, device=device)
        by_layer = self.storage.view(num_blocks + 1, layers, -1)
        split = places * layout.key_size
        shape = (num_blocks + 1, layers, heads, block_size, -1)
        self.keys = by_layer[:, :, :split].view(shape)
        self.values = by_layer[:, :, split:].view(shape)
        self._layers = [(self.keys[:, i], self.values[:, i]) for i in range(layers)]
        # Hand-overs must not wait for steps that are under way, which have other blocks.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def block_bytes(self) -> int:
        return self.storage.shape[1] * self.storage.element_size()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [num_blocks + 1, kv_heads, block_size, size]."""
        return self._layers[layer]

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys [kv_heads, T, key_size] and values [kv_heads, T, value_size], their last dimension
        contiguous, to places [T] (int32)."""
        own_keys, own_values = self._layers[layer]
        if self._stream is not None:
            from baton.engine.attention.triton import copies

            copies.write(keys, values, places, own_keys, own_values)
            return
        blocks, offsets = places // self.block_size, places % self.block_size
        own_keys[blocks, :, offsets] = keys.transpose(0, 1)
        own_values[blocks, :, offsets] = values.transpose(0, 1)

    def copy(self, copy: BlockCopy) -> None:
        """Copies a block. What lies after its first num_positions comes along and means nothing."""
        self.storage[copy.target].copy_(self.storage[copy.source])

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None:
        """Whole blocks to the host: out is uint8 [count, block_bytes]. When it is pinned, this only
        enqueues the copy on the current stream."""
        out.copy_(self._bytes(first, count), non_blocking=out.is_pinned())

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None:
        """The inverse of blocks_out. A pinned raw must stay as it is until the copy is done."""
        self._bytes(first, count).copy_(raw, non_blocking=raw.is_pinned())

    def gather(self, extents: Extents, first_position: int, count: int) -> torch.Tensor:
        """KV of positions in the wire's layout and dtype, flat and on the cache's device.

        Enqueued on the current stream; the steps that wrote these positions are done.
        """
        places = self._places(extents, first_position, count)
        numbers = self.storage.new_empty(count * self._position_elements)
        if self._stream is not None:
            from baton.engine.attention.triton import copies

            copies.transfer(self.keys, self.values, places, numbers, packing=True)
            return converted(numbers, self._wire_dtype)
        parts = keys_and_values(self.layout, count, numbers)
        for part, memory in zip(parts, (self.keys, self.values), strict=True):
            found = memory[places // self.block_size, :, :, places % self.block_size]
            part.copy_(found.transpose(0, 1))
        return converted(numbers, self._wire_dtype)

    def scatter(
        self, extents: Extents, first_position: int, count: int, wire: torch.Tensor
    ) -> None:
        """The inverse of gather; wire must stay as it is until the current stream is through."""
        places = self._places(extents, first_position, count)
        numbers = converted(wire, self.storage.dtype)
        if self._stream is not None:
            from baton.engine.attention.triton import copies

            copies.transfer(self.keys, self.values, places, numbers, packing=False)
            return
        parts = keys_and_values(self.layout, count, numbers)
        for part, memory in zip(parts, (self.keys, self.values), strict=True):
            rows = part.transpose(0, 1)
            memory[places // self.block_size, :, :, places % self.block_size] = rows

    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None:
        """See ModelRunner.pack. Fastest when `out` is pinned memory."""
        host = as_tensor(self.layout, count, out)
        with self._apart():
            host.copy_(self.gather(extents, first_position, count))

    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None:
        """See ModelRunner.unpack. A read-only payload is copied once more."""
        if payload.readonly:
            payload = memoryview(bytearray(payload))
        host = as_tensor(self.layout, count, payload)
        with self._apart():
            wire = host.to(self.device, non_blocking=host.is_pinned())
            self.scatter(extents, first_position, count, wire)
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def _position_elements(self) -> int:
        layout = self.layout
        return layout.num_layers * layout.num_kv_heads * (layout.key_size + layout.value_size)

    def _apart(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bytes(self, first: int, count: int) -> torch.Tensor:
        return self.storage.narrow(0, first, count).view(torch.uint8)

    def _places(self, extents: Extents, first_position: int, count: int) -> torch.Tensor:
        check_extents(extents, first_position + count, self.num_blocks, self.block_size)
        found = places_of(block_ids(extents), first_position, count, self.block_size)
        return torch.from_numpy(found).to(self.device)
