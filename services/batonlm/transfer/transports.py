"""A worker's staging memory with every transport that can reach it, each on a thread of its own.

A transport's thread sleeps while nothing is in flight, polls in short growing naps while a read is
awaited, and once a second when all that is left are orphaned reads: those that nobody awaits any
more. Their buffers come back through `StagingBuffer.settle` when the transport says that they have
ended, and in no other way.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.scheduler.plan import StagingMemory
from batonlm.transfer import nixl
from batonlm.transfer.kv_chunk import POLY
from batonlm.transfer.loopback import LoopbackTransport
from batonlm.transfer.staging import (
    NO_FAULTS,
    Faults,
    KvTransport,
    ReadState,
    StagingBuffer,
    StagingPool,
    TransportError,
)
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, inherited
from batonlm.v1 import handover_pb2 as pb

SHORTEST_NAP_S = 20e-6
LONGEST_NAP_S = 200e-6
ORPHANED_NAP_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class _Read:
    """One read, from the call on."""

    peer: str
    remote_buffer: int
    buffer: StagingBuffer
    """Stays lent until the transport has released the handle."""
    num_bytes: int
    done: asyncio.Future[bool]
    """Whether it succeeded."""
    handle: object = None
    state: ReadState = ReadState.RUNNING


class TransferReader:
    """Awaitable reads through one KvTransport. Made, used and closed on one event loop."""

    def __init__(self, make: Callable[[], KvTransport]) -> None:
        """make: builds the transport, on the reader's thread, as every later call is made."""
        self._make = make
        # Not a SimpleQueue: its `get` may wait for ever when its thread is held up for longer than
        # the timeout (CPython 3.11; on busy cores after some 1500 naps of 20 microseconds).
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._in_flight: list[_Read] = []
        self._leaving: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)
        self._built: KvTransport | None = None
        self._closing = self._stopped = False

    async def start(self) -> None:
        """Builds the transport. Raises TransportError."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        try:
            self.metadata = await self._call(self._build)
        except BaseException:
            self._commands.put(self._stop)
            raise

    @property
    def name(self) -> str:
        return self._transport.name

    async def add_peer(self, peer: str, metadata: bytes, ring: pb.StagingPoolDescription) -> None:
        """Makes a peer's ring reachable. Raises TransportError."""

        def add() -> None:
            self._leaving.discard(peer)
            self._transport.add_peer(peer, metadata, ring)

        await self._call(add)

    async def remove_peer(self, peer: str) -> None:
        """Forgets a peer, as soon as none of its reads is running any more."""

        def remove() -> None:
            self._leaving.add(peer)
            self._remove_left()

        await self._call(remove)

    async def read(
        self, peer: str, remote_buffer: int, buffer: StagingBuffer, num_bytes: int, timeout_s: float
    ) -> None:
        """Reads the first num_bytes of a peer's buffer into ours. The caller holds `buffer`
        throughout.

        Raises TransportError, also when it took longer than timeout_s. After that, or when
        cancelled, the transfer may still run: the caller releases the buffer as usual, and it stays
        orphaned until the transfer has ended.
        """
        read = _Read(peer, remote_buffer, buffer, num_bytes, self._loop.create_future())
        buffer.lend()
        self._commands.put(lambda: self._post(read))
        try:
            async with asyncio.timeout(timeout_s):
                succeeded = await read.done
        except TimeoutError:
            raise TransportError("the read was not done in time") from None
        if not succeeded:
            raise TransportError("the read failed")

    async def close(self) -> None:
        """Stops the thread. Memory that an orphaned read may still write to must stay mapped.

        Returns once the transport is closed, or at once when an orphaned read forbids that; then
        only the end of the process frees what is left. Idempotent.
        """
        if not self._closing:
            self._closing = True
            self._commands.put(self._stop)
            await asyncio.to_thread(self._thread.join)

    @property
    def idle(self) -> bool:
        """No read is in flight or orphaned."""
        return not self._in_flight

    @property
    def _transport(self) -> KvTransport:
        assert self._built is not None, "the reader was not started"
        return self._built

    def _build(self) -> bytes:
        self._built = self._make()
        return self._built.metadata()

    async def _call(self, work: Callable[[], T]) -> T:
        result: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                value = work()
            except Exception as error:
                self._call_back(_resolve, result, error, None)
            else:
                self._call_back(_resolve, result, None, value)

        self._commands.put(run)
        return await result

    def _run(self) -> None:
        nap = SHORTEST_NAP_S
        while not self._stopped:
            try:
                self._commands.get(timeout=self._nap(nap))()
                nap = SHORTEST_NAP_S
            except queue.Empty:
                nap = min(2 * nap, LONGEST_NAP_S)
            self._poll()

    def _nap(self, nap: float) -> float | None:
        if not self._in_flight:
            return None
        awaited = any(not read.done.done() for read in self._in_flight)
        return nap if awaited else ORPHANED_NAP_S

    def _post(self, read: _Read) -> None:
        try:
            if read.peer in self._leaving:
                raise TransportError("unknown peer")
            read.handle = self._transport.post(
                read.peer, read.remote_buffer, read.buffer.index, read.num_bytes
            )
        except TransportError:
            self._call_back(_settle, read, False)
            return
        self._in_flight.append(read)

    def _poll(self) -> None:
        still: list[_Read] = []
        for read in self._in_flight:
            if read.state is ReadState.RUNNING:
                read.state = self._transport.poll(read.handle)
            if read.state is ReadState.RUNNING or not self._released(read):
                still.append(read)
            else:
                self._call_back(_settle, read, read.state is ReadState.DONE)
        if len(still) != len(self._in_flight):
            self._in_flight = still
            self._remove_left()

    def _released(self, read: _Read) -> bool:
        try:
            self._transport.release(read.handle)
        except TransportError:
            return False
        return True

    def _remove_left(self) -> None:
        busy = {read.peer for read in self._in_flight}
        for peer in self._leaving - busy:
            self._transport.remove_peer(peer)
            self._leaving.discard(peer)

    def _stop(self) -> None:
        self._stopped = True
        if self._built is not None and not self._in_flight:
            self._built.close()

    def _call_back(self, function: Callable[..., None], *arguments: object) -> None:
        # The loop may be closed already when an orphaned read ends late.
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return


def _resolve(result: asyncio.Future[T], error: Exception | None, value: T) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


def _settle(read: _Read, succeeded: bool) -> None:
    read.buffer.settle()
    if not read.done.done():
        read.done.set_result(succeeded)


CHOICES = ("auto", "nixl", "loopback")

log = logging.getLogger(__name__)


class Staging:
    """One staging pool and its readers by transport name, best first."""

    def __init__(
        self,
        ring: StagingPool,
        readers: dict[str, TransferReader],
        ucx: Ucx,
        *,
        named: bool = True,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """named: the operator named each transport, so that none may be missing."""
        self.ring, self.readers, self.faults = ring, readers, faults
        self.ucx = ucx
        """How NIXL may move KV."""
        self.quiet = True
        """False once closed with an orphaned transfer, which may still write into the pool. Then
        nothing of it may be torn down any more: the process has to end without that."""
        self._named = named

    @classmethod
    async def open(
        cls,
        instance_id: str,
        *,
        transport: str,
        num_buffers: int,
        buffer_bytes: int,
        memory: StagingMemory | None = None,
        ucx: Ucx | None = None,
        faults: Faults = NO_FAULTS,
    ) -> Staging:
        """Allocates the pool and starts the transports.

        memory: of a device, which the pool lies in and owns, also when this raises; None: the
        host's. Only NIXL moves KV between devices' memories. transport: nixl, loopback, or auto
        (both, NIXL first, which may be missing). ucx: None stays on this machine. Raises
        Unavailable when the transport that was named cannot be started, or none, and
        InvalidArgument when the environment sends UCX where it may not go.
        """
        if transport not in CHOICES:
            raise InvalidArgument(f"must be one of {', '.join(CHOICES)}", field="transport")
        allowed = ucx or choose(KvNetwork.LOCAL, inherited=inherited())
        ring = StagingPool(num_buffers, buffer_bytes, memory)
        makers: dict[str, Callable[[], KvTransport]] = {
            "nixl": lambda: faults.transport(nixl.NixlTransport(ring, instance_id, allowed)),
            "loopback": lambda: faults.transport(LoopbackTransport(ring)),
        }
        if transport != "auto":
            makers = {transport: makers[transport]}
        elif not nixl.available():
            del makers["nixl"]
        readers: dict[str, TransferReader] = {}
        for name, make in makers.items():
            reader = TransferReader(make)
            try:
                await reader.start()
            except TransportError:
                if transport == "auto":
                    continue
                break
            readers[name] = reader
        if not readers:
            ring.close()
            raise Unavailable(f"the KV transport {transport} could not be started")
        return cls(ring, readers, allowed, named=transport != "auto", faults=faults)

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of KV chunks that may be sent from here and received here, best first."""
        allowed = self.ucx.network.digests
        return allowed if self.ring.memory.in_host else (POLY,)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.readers)

    async def give_up(self, name: str, why: str) -> None:
        """Goes on without a transport that does not work.

        Raises Unavailable when the operator named it, or it is the last one.
        """
        if self._named or len(self.readers) == 1:
            raise Unavailable(f"the KV transport {name} does not work here: {why}")
        log.warning("KV will not move over %s, which does not work here: %s", name, why)
        await self._close(self.readers.pop(name))

    async def close(self) -> None:
        """Stops the transports and unmaps the pool, unless an orphaned transfer may still write."""
        for reader in self.readers.values():
            await self._close(reader)
        if self.quiet:
            self.ring.close()

    async def _close(self, reader: TransferReader) -> None:
        self.quiet = self.quiet and reader.idle
        await reader.close()


def digests_differ(others: str, staging: Staging) -> str:
    """The difference in words when a peer's digests, `others`, are not good enough here."""
    network = staging.ucx.network.value
    where = "the host" if staging.ring.memory.in_host else "a device"
    return (
        f"digest: {others or 'none'} against {', '.join(staging.digests)} "
        f"(kv_network is {network} here, and buffers are in the memory of {where})"
    )
