"""FakeMemory, bytes in place of tensors: KV of FakeRunner; knows places and blocks, not tokens.

Per position a key and a value of 8 bytes each. Never written memory must not look like a start, so
it is all ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.scheduler.plan import BlockCopy, BlockSwap, Extents
from baton.engine.spans import spans

KEY_SIZE = 8
VALUE_SIZE = 8


class FakeMemory:
    """keys and values lie apart, as in the wire's layout. num_swap_blocks: host and disk are one.

    lost: blocks of swap memory that do not come back, as from a disk that fails.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_swap_blocks: int, lost: Iterable[int] = ()
    ):
        self._block_size = block_size
        self._planes = tuple(
            (bytearray(b"\xff" * (num_blocks * block_size * size)), size)
            for size in (KEY_SIZE, VALUE_SIZE)
        )
        self._stored = [b"\xff" * (block_size * (KEY_SIZE + VALUE_SIZE))] * num_swap_blocks
        self._lost = frozenset(lost)

    def read(self, extents: Extents, first_position: int, count: int) -> bytes:
        """Keys, then values, of consecutive positions."""
        places = list(spans(extents, first_position, count, self._block_size))
        return b"".join(
            memory[start * size : (start + length) * size]
            for memory, size in self._planes
            for start, length in places
        )

    def write(
        self, extents: Extents, first_position: int, count: int, data: bytes | memoryview
    ) -> None:
        """The inverse of read."""
        done = 0
        for memory, size in self._planes:
            for start, length in spans(extents, first_position, count, self._block_size):
                end = done + length * size
                memory[start * size : (start + length) * size] = data[done:end]
                done = end

    def copy(self, copy: BlockCopy) -> None:
        for memory, size in self._planes:
            source, target = (b * self._block_size * size for b in (copy.source, copy.target))
            length = copy.num_positions * size
            memory[target : target + length] = memory[source : source + length]

    def swap_out(self, swap: BlockSwap) -> None:
        for block, place in zip(swap.blocks, swap.stored, strict=True):
            self._stored[place] = self.read(((block, 1),), 0, self._block_size)

    def swap_in(self, swap: BlockSwap) -> list[int]:
        """Returns the blocks that did not come back."""
        missing = []
        for block, place in zip(swap.blocks, swap.stored, strict=True):
            if place in self._lost:
                missing.append(block)
            else:
                self.write(((block, 1),), 0, self._block_size, self._stored[place])
        return missing
