"""The block pool's memory on a GPU: block-major, and its ways to the wire and to swap memory.

All KV of a block, over all layers, is one run of memory, so that moving a block is one copy. In it
lie, layer by layer, the keys and then the values, each [head, offset, element]: what one head reads
of a block is one run too. The wire is position-major: packing and unpacking permute.

Attention reads only positions that were written, so no memory is ever cleared. One block more than
the pool has, `trash_block`, takes what padding rows of a batch write.

On the CPU the same is done by plain torch: it is where this layout is tested, not where it is fast.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from baton.core.kvcache.block_pool import BlockCopy, Extents
from baton.core.request.model import KvLayout
from baton.engine.check import check_extents
from baton.engine.wire import DTYPES, as_tensor, converted, keys_and_values


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
            from baton.engine.triton import copies

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
            from baton.engine.triton import copies

            copies.pack(self.keys, self.values, places, numbers)
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
            from baton.engine.triton import copies

            copies.unpack(self.keys, self.values, places, numbers)
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
