"""Staging memory in equal buffers, and who owns each.

`core.buffer_states` says when a buffer is free again. Too much of the ring orphaned, waiting for
transfers that nothing can stop, and only a restart of the process helps.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
from collections import Counter, deque

from baton.core.errors import Overloaded
from baton.core.handover.buffer_states import BufferEvent, BufferState, follow
from baton.core.handover.messages import StagingPoolDescription

ALIGNMENT = 4096
MAX_WAITING = 4096


class StagingBuffer:
    """A taken buffer. Whoever took it calls `release` exactly once.

    view: the buffer's memory, buffer_bytes long. A transfer into it is bracketed by `lend` and
    `settle`; in between, `release` leaves the buffer orphaned.
    """

    __slots__ = ("_ring", "_state", "index", "peer", "view")

    def __init__(self, ring: StagingPool, index: int, peer: str, view: memoryview) -> None:
        self._ring = ring
        self._state = follow(BufferState.FREE, BufferEvent.TAKE)
        self.index, self.peer, self.view = index, peer, view

    def release(self) -> None:
        self._move(BufferEvent.RELEASE)

    def lend(self) -> None:
        self._move(BufferEvent.LEND)

    def settle(self) -> None:
        """The transfer has ended, well or badly: it will not write any more."""
        self._move(BufferEvent.SETTLE)

    def _move(self, event: BufferEvent) -> None:
        before, self._state = self._state, follow(self._state, event)
        self._ring._moved(self, before, self._state)


class StagingPool:
    """num_buffers buffers of buffer_bytes each, in one page-aligned memory. Used on the event loop
    only.

    The memory is an anonymous file (memfd) that cannot shrink: processes of the same machine may
    map it, and it is gone when the last of them is, however that one ended.
    No peer holds more than `share` buffers, so a slow one leaves room for the others.

    exhausted_event: set once the ring is exhausted, and never cleared, even if buffers come back.
    What watches it tells others to look elsewhere and ends the process; taking that back halfway
    would draw work to a ring that has just been lost to its peers, and a restart, the only thing
    that is sure to stop a transfer, costs seconds. no_orphaned: set while no buffer is orphaned.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        if num_buffers < 2:
            raise ValueError("num_buffers must be at least 2")
        if buffer_bytes < ALIGNMENT or buffer_bytes % ALIGNMENT:
            raise ValueError(f"buffer_bytes must be a multiple of {ALIGNMENT}")
        self.num_buffers, self.buffer_bytes = num_buffers, buffer_bytes
        self.share = max(2, num_buffers // 2)
        size = num_buffers * buffer_bytes
        self.fd = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self.fd, size)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        whole = memoryview(self._memory)
        self._views = [whole[i * buffer_bytes : (i + 1) * buffer_bytes] for i in range(num_buffers)]
        whole.release()
        self._free = deque(range(num_buffers))
        self._orphaned = 0
        self.exhausted_event = asyncio.Event()
        self.no_orphaned = asyncio.Event()
        self.no_orphaned.set()
        self._held_by: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[StagingBuffer]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_orphaned(self) -> int:
        return self._orphaned

    @property
    def exhausted(self) -> bool:
        """More than a quarter is orphaned: stop taking work and restart the process."""
        return self._orphaned * 4 > self.num_buffers

    def describe(self) -> StagingPoolDescription:
        return StagingPoolDescription(self.base_address, self.buffer_bytes, self.num_buffers)

    def view(self, index: int) -> memoryview:
        """A buffer's memory, whoever owns it."""
        return self._views[index]

    def take(self, peer: str) -> StagingBuffer | None:
        """A free buffer for work with `peer`; None without one or when the peer has its share."""
        if not self._free or self._held_by[peer] >= self.share:
            return None
        index = self._free.popleft()
        self._held_by[peer] += 1
        return StagingBuffer(self, index, peer, self._views[index])

    async def wait(self, peer: str) -> StagingBuffer:
        """Waits for a buffer, in order of arrival among those whose peer is below its share.

        The caller bounds the wait. Raises Overloaded when too many wait already.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("too many hand-overs wait for a buffer")
        ready: asyncio.Future[StagingBuffer] = asyncio.get_running_loop().create_future()
        entry = (peer, ready)
        self._waiting.append(entry)
        self._serve()
        try:
            return await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                ready.result().release()
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def close(self) -> None:
        """Lets go of the memory. Only when no transfer can touch it any more; idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # The mapping goes with the last view of it, which somebody may still hold.
        self._views.clear()
        del self._memory

    def _return(self, buffer: StagingBuffer) -> None:
        self._free.append(buffer.index)
        self._held_by[buffer.peer] -= 1
        if not self._held_by[buffer.peer]:
            del self._held_by[buffer.peer]
        self._serve()

    def _moved(self, buffer: StagingBuffer, before: BufferState, after: BufferState) -> None:
        self._orphaned += (after is BufferState.ORPHANED) - (before is BufferState.ORPHANED)
        if self.exhausted:
            self.exhausted_event.set()
        if self._orphaned:
            self.no_orphaned.clear()
        else:
            self.no_orphaned.set()
        if after is BufferState.FREE:
            self._return(buffer)

    def _serve(self) -> None:
        for entry in list(self._waiting):
            peer, ready = entry
            if not self._free:
                return
            if ready.done():
                continue
            buffer = self.take(peer)
            if buffer is not None:
                self._waiting.remove(entry)
                ready.set_result(buffer)
