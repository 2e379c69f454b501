"""Staging memory in equal buffers, who owns each, and the port through which KV chunks are read.

`core.handover` says when a buffer is free again. When too much of the pool is orphaned, waiting for
transfers that nothing can stop, only a restart of the process helps.

A transport READs from a peer's pool into buffers of our own. It has no timeout, no abort and no
revocation, because NIXL over UCX has none: a posted read ends when `poll` returns its end and
`release` succeeds, and until then it may write into its buffer. All calls come from one thread,
that of `batonlm.transfer.transports.TransferReader`, and may block it. What goes wrong after `post`
has returned is reported as FAILED. `nixl.NixlTransport` and, without NIXL, for processes of one
machine, `loopback.LoopbackTransport` implement it; both pass `tests/kv/test_transport_contract.py`.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from batonlm.core.errors import Overloaded
from batonlm.core.handover.leaf_hash import Points
from batonlm.core.handover.table import BufferEvent, BufferState, follow_buffer
from batonlm.core.scheduler.plan import KvPayload, MemoryRegion, StagingMemory, in_host
from batonlm.transfer.leaf_hash import leaf_hashes
from batonlm.v1 import handover_pb2 as pb

ALIGNMENT = 4096
MAX_WAITING = 4096


class StagingBuffer:
    """A taken buffer. Whoever took it calls `release` exactly once.

    A transfer into it is bracketed by `lend` and `settle`; in between, `release` leaves the buffer
    orphaned.
    """

    __slots__ = ("_ring", "_state", "index", "landing", "peer", "view")

    def __init__(
        self, ring: StagingPool, index: int, peer: str, view: Any, *, landing: bool
    ) -> None:
        self._ring = ring
        self._state = follow_buffer(BufferState.FREE, BufferEvent.TAKE)
        self.index, self.peer, self.landing = index, peer, landing
        self.view = view
        """The buffer's memory, buffer_bytes long: a KvPayload."""

    def release(self) -> None:
        self._move(BufferEvent.RELEASE)

    def lend(self) -> None:
        self._move(BufferEvent.LEND)

    def settle(self) -> None:
        """The transfer has ended, well or badly: it will not write any more."""
        self._move(BufferEvent.SETTLE)

    def _move(self, event: BufferEvent) -> None:
        before, self._state = self._state, follow_buffer(self._state, event)
        self._ring._moved(self, before, self._state)


class HostMemory:
    """See `batonlm.core.scheduler.plan.StagingMemory`.

    An anonymous file (memfd) that cannot shrink: processes of the same machine may map it, and it
    is gone when the last of them is, however that one ended.
    """

    in_host, kind = True, "DRAM"

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self.fd, num_bytes)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def regions(self) -> tuple[MemoryRegion]:
        return (MemoryRegion(self.address, self.num_bytes, 0),)

    def part(self, start: int, num_bytes: int) -> memoryview:
        return memoryview(self._memory)[start : start + num_bytes]

    def read(self, part: KvPayload) -> bytes:
        return bytes(in_host(part))

    def write(self, part: KvPayload, data: bytes) -> None:
        in_host(part)[:] = data

    def leaf_hashes(self, part: KvPayload, points: Points) -> bytes:
        return leaf_hashes(in_host(part), points)

    def close(self) -> None:
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # The mapping goes with the last view of it, which may still be held.
        del self._memory


class StagingPool:
    """num_buffers buffers of buffer_bytes each, in one memory, the host's unless another is given.
    Used on the event loop only. No peer holds more than `share` buffers to land in, and as many to
    pack into, so a slow one leaves room for the others.

    What lands waits for a peer to pack, so workers that hand over to one another would all wait if
    all of their buffers were there to land in: the last free buffer is for packing only.
    """

    def __init__(
        self, num_buffers: int, buffer_bytes: int, memory: StagingMemory | None = None
    ) -> None:
        """memory: num_buffers * buffer_bytes bytes of it become the pool's, which closes it."""
        if num_buffers < 2:
            raise ValueError("num_buffers must be at least 2")
        if buffer_bytes < ALIGNMENT or buffer_bytes % ALIGNMENT:
            raise ValueError(f"buffer_bytes must be a multiple of {ALIGNMENT}")
        self.num_buffers, self.buffer_bytes = num_buffers, buffer_bytes
        self.share = max(2, num_buffers // 2)
        self.memory = memory or HostMemory(num_buffers * buffer_bytes)
        self._views = [self.memory.part(i * buffer_bytes, buffer_bytes) for i in range(num_buffers)]
        self._free = deque(reversed(range(num_buffers)))
        self._orphaned = 0
        self.exhausted_event = asyncio.Event()
        """Set once the pool is exhausted, and never cleared, even if buffers come back. A worker
        that sees it turns work away and ends; taking that back halfway would draw work to a pool
        that has just been lost to its peers, and a restart, the only thing that is sure to stop a
        transfer, costs seconds."""
        self.no_orphaned = asyncio.Event()
        """Set while no buffer is orphaned."""
        self.no_orphaned.set()
        self._held_by: Counter[tuple[str, bool]] = Counter()
        """By peer and whether to land in."""
        self._num_landing = 0
        self._waiting: deque[tuple[str, bool, asyncio.Future[StagingBuffer]]] = deque()

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

    def describe(self) -> pb.StagingPoolDescription:
        made = pb.StagingPoolDescription(
            buffer_bytes=self.buffer_bytes,
            num_buffers=self.num_buffers,
            memory_kind=self.memory.kind,
        )
        first, *others = self.memory.regions
        if others:
            # Without an address of the whole, so that a peer that knows of no regions finds
            # nothing, instead of a wrong buffer.
            for address, _, device_id in self.memory.regions:
                made.regions.add(base_address=address, device_id=device_id)
        else:
            made.base_address, made.device_id = first.address, first.device_id
        return made

    def view(self, index: int) -> Any:
        """A buffer's memory, a KvPayload, whoever owns it."""
        return self._views[index]

    def take(self, peer: str, *, landing: bool = False) -> StagingBuffer | None:
        """A free buffer for work with `peer`; None without one or when the peer has its share.
        landing: `peer` fills it, after it has taken one of its own."""
        if not self._free or self._held_by[peer, landing] >= self.share:
            return None
        if landing and self._num_landing >= self.num_buffers - 1:
            return None
        # In the host, the one that came back last: it is still in a cache. Of several devices each
        # in turn, so that all their links to the network carry some.
        several = len(self.memory.regions) > 1
        index = self._free.popleft() if several else self._free.pop()
        self._held_by[peer, landing] += 1
        self._num_landing += landing
        return StagingBuffer(self, index, peer, self._views[index], landing=landing)

    async def wait(self, peer: str, *, landing: bool = False) -> StagingBuffer:
        """Waits for a buffer, in order of arrival among those whose peer is below its share.

        The caller bounds the wait. Raises Overloaded when too many wait already.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("too many hand-overs wait for a buffer")
        ready: asyncio.Future[StagingBuffer] = asyncio.get_running_loop().create_future()
        entry = (peer, landing, ready)
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
        """Frees the memory. Only when no transfer can touch it any more; idempotent."""
        self._views.clear()
        self.memory.close()

    def _return(self, buffer: StagingBuffer) -> None:
        self._free.append(buffer.index)
        self._num_landing -= buffer.landing
        holder = buffer.peer, buffer.landing
        self._held_by[holder] -= 1
        if not self._held_by[holder]:
            del self._held_by[holder]
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
            peer, landing, ready = entry
            if not self._free:
                return
            if ready.done():
                continue
            buffer = self.take(peer, landing=landing)
            if buffer is not None:
                self._waiting.remove(entry)
                ready.set_result(buffer)


class TransportError(Exception):
    """An unknown or unreachable peer, a read out of range, or a transport that does not start."""


class ReadState(Enum):
    RUNNING = 1
    DONE = 2
    FAILED = 3


class KvTransport(Protocol):
    """Moves bytes between two pools. Handles are opaque and owned by whoever posted."""

    @property
    def name(self) -> str: ...

    def metadata(self) -> bytes:
        """What a peer needs to reach our pool; opaque, of this machine and process start."""

    def add_peer(self, peer: str, metadata: bytes, ring: pb.StagingPoolDescription) -> None:
        """Makes a peer's pool reachable. Raises TransportError; then nothing is left behind.

        Our own pool is reached under our own name, the instance id.
        """

    def remove_peer(self, peer: str) -> None:
        """Forgets a peer. Only when none of its reads is running. Unknown peers are no error."""

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        """Starts a read of a buffer's first num_bytes into ours. Returns a handle for `poll`.

        Raises TransportError when nothing was started.
        """

    def poll(self, handle: object) -> ReadState:
        """Where a posted read stands. Once DONE or FAILED it stays so."""

    def release(self, handle: object) -> None:
        """Frees a handle. Only after `poll` returned DONE or FAILED.

        Raises TransportError when the buffer may not be reused yet; then it is to be called again.
        """

    def close(self) -> None:
        """Closes the transport. Only when no read is running; idempotent."""


def place_of(ring: pb.StagingPoolDescription, buffer: int) -> tuple[int, int]:
    """A buffer's address and its device's id. Buffers are dealt out to regions in turn."""
    if not ring.regions:
        return ring.base_address + buffer * ring.buffer_bytes, ring.device_id
    row, number = divmod(buffer, len(ring.regions))
    region = ring.regions[number]
    return region.base_address + row * ring.buffer_bytes, region.device_id


def check_range(
    theirs: pb.StagingPoolDescription,
    remote_buffer: int,
    ours: pb.StagingPoolDescription,
    local_buffer: int,
    size: int,
) -> None:
    """Raises TransportError when a read would leave either buffer."""
    if not (0 <= remote_buffer < theirs.num_buffers and 0 <= local_buffer < ours.num_buffers):
        raise TransportError("no such buffer")
    if not 0 < size <= min(theirs.buffer_bytes, ours.buffer_bytes):
        raise TransportError("a read must fit both buffers")


In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)


class Faults:
    """Where tests and experiments break hand-overs; this one, which serves, lets everything pass.

    `batonlm.testing.faults` names the points and breaks things there. `at` is called on the event
    loop within a side's work, the transport's methods on the reader's thread.
    """

    async def at(self, point: str, kv_chunk: KvPayload | None = None) -> None:
        """A point of a side's own work was reached. kv_chunk: header and payload in a buffer."""

    def incoming(self, side: str, messages: AsyncIterator[In]) -> AsyncIterator[In]:
        """The messages of one stream as `side` receives them."""
        return messages

    def outgoing(
        self, side: str, send: Callable[[Out], Awaitable[None]]
    ) -> Callable[[Out], Awaitable[None]]:
        """How `side` sends the messages of one stream."""
        return send

    def transport(self, transport: KvTransport) -> KvTransport:
        """How a transport's reads go."""
        return transport


NO_FAULTS = Faults()
