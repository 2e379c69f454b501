"""The block pool's memory: keys and values of all layers, and their way to and from the wire.

Storage is head-major, [layer, head, place, element]: what one head reads for an extent is then one
contiguous run, which the CPU kernel takes without a copy. The wire is position-major, so packing
and unpacking permute.

Invariant: within a tile of 16 places, those after the last written one hold zeros. Attention reads
whole tiles and masks what lies ahead; zeros keep a former owner's infinities out of that mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.core.kvcache.block_pool import BlockCopy, Extents
from baton.core.request.model import KvLayout
from baton.engine.check import check_extents
from baton.engine.config import TILE
from baton.engine.spans import spans
from baton.engine.wire import DTYPES, KeysAndValues, as_tensor, converted, keys_and_values


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
