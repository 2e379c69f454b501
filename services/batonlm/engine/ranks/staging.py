"""RanksStaging, staging memory in the GPUs of a worker's ranks.

Buffers are whole and dealt out to the GPUs in turn. The worker owns the memory, because only a
process that has allocated memory of a GPU can show it to others, which NIXL does and the worker
does for its ranks. Each rank has all of it mapped and writes its part of a KV chunk into whichever
GPU has the buffer. What a buffer holds is hashed by the rank whose GPU it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from batonlm.core.errors import BatonError, Internal
from batonlm.core.handover.leaf_hash import Points
from batonlm.core.scheduler.plan import KvPayload, MemoryRegion
from batonlm.engine.cuda import CudaMemory
from batonlm.engine.ranks.shared import GpuMemory, SharedPlace

OpenMemories = Callable[[tuple[GpuMemory, ...]], None]
"""Has all ranks map these memories and no others."""

HashLeaves = Callable[[int, SharedPlace, Points], bytes]
"""(rank, what, points): the hashes, computed by that rank."""


class RanksStaging:
    """See `batonlm.core.scheduler.plan.StagingMemory`. Parts are SharedPlaces."""

    in_host = False
    kind = "VRAM"

    def __init__(
        self,
        ranks: int,
        num_buffers: int,
        buffer_bytes: int,
        open_memories: OpenMemories,
        hash_leaves: HashLeaves,
    ) -> None:
        """ranks: the N-th has the N-th of the GPUs that this process sees. Raises Unavailable when
        a GPU has no room, or a rank cannot reach another one's memory."""
        self._buffer_bytes, self._open, self._hash = buffer_bytes, open_memories, hash_leaves
        self._blocks: list[CudaMemory] = []
        self._memories: tuple[GpuMemory, ...] = ()
        try:
            for rank in range(min(ranks, num_buffers)):
                mine = len(range(rank, num_buffers, ranks))
                self._blocks.append(CudaMemory(rank, mine * buffer_bytes))
            self._memories = tuple(
                GpuMemory(block.handle(), block.num_bytes, block.device) for block in self._blocks
            )
            open_memories(self._memories)
        except BaseException:
            self.close()
            raise
        self.regions = tuple(
            MemoryRegion(block.address, block.num_bytes, block.device) for block in self._blocks
        )

    def part(self, start: int, num_bytes: int) -> SharedPlace:
        buffer, within = divmod(start, self._buffer_bytes)
        row, number = divmod(buffer, len(self._memories))
        return SharedPlace(self._memories[number], row * self._buffer_bytes + within, num_bytes)

    def read(self, part: KvPayload) -> bytes:
        place, block = self._place(part)
        return block.read(place.offset, place.nbytes)

    def write(self, part: KvPayload, data: bytes) -> None:
        place, block = self._place(part)
        if len(data) != place.nbytes:
            raise Internal("as many bytes are written as a part has")
        block.write(place.offset, data)

    def leaf_hashes(self, part: KvPayload, points: Points) -> bytes:
        place, block = self._place(part)
        return self._hash(block.device, place, points)

    def close(self) -> None:
        if self._memories:
            self._memories = ()
            # Ranks first: memory must not be freed that is mapped elsewhere. One that does not
            # answer is about to end, with its mappings.
            with suppress(BatonError):
                self._open(())
        for block in self._blocks:
            block.close()

    def _place(self, part: KvPayload) -> tuple[SharedPlace, CudaMemory]:
        if not isinstance(part, SharedPlace) or not isinstance(part.file, GpuMemory):
            raise Internal("this payload is not in the ranks' memory")
        return part, self._blocks[part.file.rank]
