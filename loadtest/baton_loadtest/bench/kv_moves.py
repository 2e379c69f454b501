"""The hand-overs of `baton bench kv` at several sizes, from buffer to buffer up to the whole.

This process receives from one that sends (`serve_sender`), over real gRPC and the real transport,
without computing KV. The parts of a hand-over are also timed alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from baton_loadtest.child import answer, progress
from baton_loadtest.launch import Peer, peer
from batonlm.cli.ports import HOST, free_ports
from batonlm.core.handover.table import KvChunkRange
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.attempt import ChoiceTokens, SequenceKey
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.engine.kv.cache import KvCache
from batonlm.engine.thread import CopyThread
from batonlm.rpc.channels import Channels
from batonlm.rpc.loop import Loop
from batonlm.rpc.server import ProcessServer, Service
from batonlm.transfer.kv_chunk import (
    DIGEST_BYTES,
    HEADER_BYTES,
    POLY,
    XXH3,
    Sealer,
    positions_per_kv_chunk,
)
from batonlm.transfer.loopback import LoopbackTransport
from batonlm.transfer.nixl import NixlTransport
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import MAX_IN_FLIGHT, READ_S, KvReceiver, TransferRequest
from batonlm.transfer.sender import KvSender
from batonlm.transfer.staging import ALIGNMENT, KvTransport, ReadState, StagingPool
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, inherited
from batonlm.v1 import handover_pb2, handover_pb2_grpc

BLOCK_SIZE = 16
ROUNDS = 7
MEGABYTE = 1_000_000
SECRET = bytes(range(16))
SENDER_DEADLINE_S = 60.0
TOKENS = (ChoiceTokens(SequenceKey("bench", 0, 1), 0, (7,)),)

NO_DIGEST = "none"
"""Instead of a digest's name: KV chunks are not sealed."""


def run_moves(job: dict[str, Any]) -> dict[str, Any]:
    """job: transport, layout, sizes (megabytes), num_buffers, buffer_bytes, digest, sender_core
    (None: not pinned).

    Returns by size, as a string, the bytes, and the median seconds of: raw (one read of all of it),
    memcpy, buffers (buffer to buffer, verified), pack, seal, verify, unpack (each alone), pools
    (pool to pool, from the grant on), whole (with an earlier handshake), first (with a handshake),
    nothing (a hand-over whose KV is all present already, from the grant on).
    """
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(_measure(job))


async def _measure(job: dict[str, Any]) -> dict[str, Any]:
    layout = KvLayout(**job["layout"])
    largest = max(_positions_of(size, layout) for size in job["sizes"])
    measured: dict[str, Any] = {}
    async with AsyncExitStack() as ends:
        sender = await ends.enter_async_context(peer(serve_sender, job["sender_core"]))
        hello = await sender.ask(job=job, positions=largest)
        digest = _use_digest(job["digest"])
        whole = _Whole(job["transport"], hello["whole"])
        ends.callback(whole.close)
        parts = _Parts(layout, largest, job["buffer_bytes"], digest)
        buffers = await _Buffers.open(ends, job, layout, sender, hello["kv_chunks"], digest)
        pools = await _Pools.open(ends, job, layout, sender, hello["sender"], largest)
        for size in job["sizes"]:
            positions = _positions_of(size, layout)
            num_bytes = positions * layout.bytes_per_position
            await buffers.seal(positions)
            cases: dict[str, Callable[[], Awaitable[float]]] = {
                "raw": partial(whole.read, num_bytes),
                "memcpy": partial(whole.copy, num_bytes),
                "buffers": buffers.read,
                "pools": partial(pools.granted, positions),
                "whole": partial(pools.collected, positions),
                "first": partial(pools.met_and_collected, positions),
                "nothing": partial(pools.granted, positions, cached=positions),
            }
            times: dict[str, list[float]] = {name: [] for name in cases}
            # Cases take turns, after a round that does not count.
            for number in range(ROUNDS + 1):
                for name, timed in cases.items():
                    seconds = await timed()
                    times[name] += [seconds] if number else []
            found = {name: median(each) for name, each in times.items()}
            measured[str(size)] = {**found, **parts.spent(positions), "bytes": num_bytes}
            progress(f"{job['transport']}, {job['digest']}: {size} MB")
    return measured


def _positions_of(megabytes: float, layout: KvLayout) -> int:
    """Returns the whole positions in so many megabytes, at least one."""
    return max(1, int(megabytes * MEGABYTE) // layout.bytes_per_position)


def _chunks(positions: int, buffer_bytes: int, layout: KvLayout) -> list[KvChunkRange]:
    """Returns the KV chunks of so many positions."""
    each = positions_per_kv_chunk(buffer_bytes, layout)
    return [
        KvChunkRange(index, first, min(each, positions - first))
        for index, first in enumerate(range(0, positions, each))
    ]


def _kv_memory(layout: KvLayout, positions: int) -> tuple[KvCache, Extents]:
    """Returns KV memory for so many positions in one run of blocks, with every page written."""
    import torch

    torch.set_num_threads(1)
    blocks = -(-positions // BLOCK_SIZE)
    cache = KvCache(layout, blocks, BLOCK_SIZE, torch.device("cpu"))
    for tensor in (cache.keys, cache.values):
        tensor.normal_()
    return cache, ((0, blocks),)


def _use_digest(digest: str) -> str:
    """Returns the digest with which this process seals KV chunks. NO_DIGEST permanently makes all
    digests zero, which shows the cost of a digest and is not fit for serving."""
    if digest != NO_DIGEST:
        return digest
    setattr(Sealer, "_digest_of", lambda *_: bytes(DIGEST_BYTES))  # noqa: B010  # a method
    return XXH3


def identity(role: str) -> WorkerIdentity:
    """Returns a new identity, at a free address of the loopback interface."""
    return WorkerIdentity(role, secrets.token_hex(16), f"{HOST}:{free_ports(1)[0]}")


async def open_staging(ends: AsyncExitStack, job: dict[str, Any], instance_id: str) -> Staging:
    staging = await Staging.open(
        instance_id,
        transport=job["transport"],
        num_buffers=job["num_buffers"],
        buffer_bytes=job["buffer_bytes"],
        ucx=Ucx(KvNetwork.ISOLATED) if job["digest"] == POLY else None,
    )
    ends.push_async_callback(staging.close)
    return staging


async def add_sender(ends: AsyncExitStack, me: WorkerIdentity, sender: KvSender) -> None:
    """Serves a sender at its own address."""
    add = partial(handover_pb2_grpc.add_HandoverServicer_to_server, sender)
    service = Service("baton.v1.Handover", add)
    server = ProcessServer(listen=me.address, services=[service], reflection=False)
    await server.start()
    ends.push_async_callback(server.stop, 0.2)


class _ReadableRing:
    """A pool that another process may read without a hand-over."""

    def __init__(self, transport: str, num_buffers: int, buffer_bytes: int) -> None:
        self.instance_id = secrets.token_hex(16)
        self.ring = StagingPool(max(2, num_buffers), buffer_bytes)
        self.transport: KvTransport
        if transport == "loopback":
            self.transport = LoopbackTransport(self.ring)
        else:
            network = choose(KvNetwork.LOCAL, inherited=inherited())
            self.transport = NixlTransport(self.ring, self.instance_id, network)

    def describe(self) -> dict[str, Any]:
        return {
            "instance_id": self.instance_id,
            "metadata": self.transport.metadata().hex(),
            "ring": self.ring.describe().SerializeToString().hex(),
        }

    def close(self) -> None:
        self.transport.close()
        self.ring.close()


def _described(ring: dict[str, Any]) -> tuple[str, bytes, handover_pb2.StagingPoolDescription]:
    """Returns the instance id, metadata and pool of another process's _ReadableRing."""
    metadata = bytes.fromhex(ring["metadata"])
    described = handover_pb2.StagingPoolDescription.FromString(bytes.fromhex(ring["ring"]))
    return ring["instance_id"], metadata, described


class _Whole:
    """One read of all data by the transport alone, polled without a pause."""

    def __init__(self, transport: str, exhibit: dict[str, Any]) -> None:
        self._peer, metadata, theirs = _described(exhibit)
        self._ours = _ReadableRing(transport, 2, theirs.buffer_bytes)
        self._ours.transport.add_peer(self._peer, metadata, theirs)
        self.close = self._ours.close

    async def read(self, num_bytes: int) -> float:
        transport = self._ours.transport
        began = time.perf_counter()
        handle = transport.post(self._peer, 0, 0, num_bytes)
        while (state := transport.poll(handle)) is ReadState.RUNNING:
            pass
        transport.release(handle)
        seconds = time.perf_counter() - began
        assert state is ReadState.DONE
        return seconds

    async def copy(self, num_bytes: int) -> float:
        """Copies from one local buffer to another."""
        import numpy as np

        source, target = (
            np.frombuffer(self._ours.ring.view(index), np.uint8, num_bytes) for index in (1, 0)
        )
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began


class _Parts:
    """Copies KV through one buffer, chunk by chunk, so that each part finds its input in the same
    memory as in a hand-over."""

    def __init__(self, layout: KvLayout, positions: int, buffer_bytes: int, digest: str) -> None:
        self._layout, self._buffer_bytes = layout, buffer_bytes
        self._source, self._extents = _kv_memory(layout, positions)
        self._target, _ = _kv_memory(layout, positions)
        self._ring = StagingPool(2, buffer_bytes)
        self._sealer = Sealer(SECRET, "ab" * 16, layout, self._ring.memory, digest)

    def spent(self, positions: int) -> dict[str, float]:
        """Returns the median seconds of each part over all KV chunks of so many positions."""
        rounds = [self._once(positions) for _ in range(ROUNDS + 1)][1:]
        return {name: median(one[name] for one in rounds) for name in rounds[0]}

    def _once(self, positions: int) -> dict[str, float]:
        view = self._ring.view(0)
        spent = dict.fromkeys(("pack", "seal", "verify", "unpack"), 0.0)
        for run in _chunks(positions, self._buffer_bytes, self._layout):
            header = self._sealer.header(run)
            payload = view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
            place = (self._extents, run.first_position, run.num_positions, payload)
            times = [time.perf_counter()]
            self._source.pack(*place)
            times.append(time.perf_counter())
            self._sealer.seal(header, view)
            times.append(time.perf_counter())
            wrong = self._sealer.mismatch(header, view)
            times.append(time.perf_counter())
            self._target.unpack(*place)
            times.append(time.perf_counter())
            assert not wrong
            for name, (began, ended) in zip(spent, pairwise(times), strict=True):
                spent[name] += ended - began
        return spent


class _Buffers:
    """Reads sealed KV chunks into local buffers and verifies them, a few at a time."""

    def __init__(
        self, staging: Staging, layout: KvLayout, sender: Peer, instance_id: str, digest: str
    ) -> None:
        self._staging, self._layout, self._sender = staging, layout, sender
        self._peer = instance_id
        self._sealer = Sealer(SECRET, instance_id, layout, staging.ring.memory, digest)
        self._headers: list[handover_pb2.KvChunkHeader] = []
        (self._reader,) = staging.readers.values()

    @classmethod
    async def open(
        cls,
        ends: AsyncExitStack,
        job: dict[str, Any],
        layout: KvLayout,
        sender: Peer,
        exhibit: dict[str, Any],
        digest: str,
    ) -> _Buffers:
        staging = await open_staging(ends, job, secrets.token_hex(16))
        instance_id, metadata, ring = _described(exhibit)
        made = cls(staging, layout, sender, instance_id, digest)
        await made._reader.add_peer(instance_id, metadata, ring)
        return made

    async def seal(self, positions: int) -> None:
        """Makes the sender fill its buffers with so many positions."""
        digests = (await self._sender.ask(seal=positions))["digests"]
        chunks = _chunks(positions, self._staging.ring.buffer_bytes, self._layout)
        self._headers = [self._sealer.header(run) for run in chunks]
        for header, digest in zip(self._headers, digests, strict=True):
            header.digest = bytes.fromhex(digest)

    async def read(self) -> float:
        window = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def land(remote_buffer: int, header: handover_pb2.KvChunkHeader) -> None:
            async with window:
                buffer = await self._staging.ring.wait(self._peer)
                try:
                    size = HEADER_BYTES + header.payload_bytes
                    await self._reader.read(self._peer, remote_buffer, buffer, size, READ_S)
                    if self._sealer.is_slow(header):
                        wrong = await asyncio.to_thread(self._sealer.mismatch, header, buffer.view)
                    else:
                        wrong = self._sealer.mismatch(header, buffer.view)
                    assert not wrong
                finally:
                    buffer.release()

        began = time.perf_counter()
        await asyncio.gather(*(land(index, header) for index, header in enumerate(self._headers)))
        return time.perf_counter() - began


class _Pools:
    """Receives from the sender's pool into a local one."""

    def __init__(
        self,
        receiver: KvReceiver,
        channels: Channels,
        me: WorkerIdentity,
        sender: Peer,
        them: WorkerIdentity,
        place: tuple[KvCache, Extents],
    ) -> None:
        self._receiver, self._channels = receiver, channels
        self._me, self._sender, self._them = me, sender, them
        self._cache, self._extents = place
        self._copies = CopyThread()

    @classmethod
    async def open(
        cls,
        ends: AsyncExitStack,
        job: dict[str, Any],
        layout: KvLayout,
        sender: Peer,
        them: dict[str, Any],
        positions: int,
    ) -> _Pools:
        me = identity("decode")
        staging = await open_staging(ends, job, me.instance_id)
        channels = Channels()
        ends.push_async_callback(channels.close)
        receiver = KvReceiver(
            me, layout, staging, lambda peer: SenderConnection(channels.get(peer.address))
        )
        ends.push_async_callback(receiver.close)
        place = _kv_memory(layout, positions)
        made = cls(receiver, channels, me, sender, WorkerIdentity(**them), place)
        ends.callback(made._copies.close)
        return made

    async def granted(self, positions: int, cached: int = 0) -> float:
        """Returns the seconds from the receiver's grant to the last byte in its pool."""
        _, granted, ended = await self._collect(positions, cached)
        return ended - granted

    async def collected(self, positions: int) -> float:
        """Returns the seconds of a whole hand-over after an earlier handshake."""
        began, _, ended = await self._collect(positions, 0)
        return ended - began

    async def met_and_collected(self, positions: int) -> float:
        """Returns the seconds of a whole hand-over with a handshake; only the sender's address is
        known before."""
        await self._receiver.forget(self._them.instance_id)
        await self._channels.drop(self._them.address)
        return await self.collected(positions)

    async def _collect(self, positions: int, cached: int) -> tuple[float, float, float]:
        handover_id = secrets.token_bytes(16)
        await self._sender.ask(
            offer=handover_id.hex(), receiver=self._me.instance_id, positions=positions
        )
        granted = 0.0

        async def reserve() -> int:
            nonlocal granted
            granted = time.perf_counter()
            return cached

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            await self._copies.run(
                partial(self._cache.unpack, self._extents, first_position, count, payload)
            )

        while not self._receiver.idle:  # noqa: ASYNC110  # no event ends this
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        await self._receiver.collect(
            TransferRequest(handover_id, self._them, positions), reserve, unpack
        )
        return began, granted, time.perf_counter()


async def serve_sender() -> None:
    """A real KvSender over a pool of random KV.

    The first command has job and positions, and is answered with the sender's identity, a staging
    pool with all of it in one buffer and one with KV chunks. Then {"seal": n} puts sealed KV chunks
    of n positions into the latter and is answered with their digests, and {"offer": id, "receiver":
    instance id, "positions": n} offers n positions, all computed.
    """
    async with AsyncExitStack() as ends:
        await answer(_Sending(ends).handle)


class _Sending:
    """The implementation of the sender's commands."""

    def __init__(self, ends: AsyncExitStack) -> None:
        self._ends = ends
        self._sender: KvSender | None = None

    async def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._sender is None:
            return await self._begin(**command)
        if "seal" in command:
            return self._seal(command["seal"])
        handover_id = bytes.fromhex(command["offer"])

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            await self._copies.run(
                partial(self._cache.pack, self._extents, first_position, count, out)
            )

        offer = self._sender.offer(
            handover_id,
            command["receiver"],
            command["positions"],
            pack,
            deadline_s=SENDER_DEADLINE_S,
        )
        offer.announce()
        offer.advance(offer.num_positions)
        offer.tokens(TOKENS)
        return {}

    async def _begin(self, job: dict[str, Any], positions: int) -> dict[str, Any]:
        layout = self._layout = KvLayout(**job["layout"])
        self._digest = _use_digest(job["digest"])
        self._cache, self._extents = _kv_memory(layout, positions)
        me = identity("prefill")
        staging = await open_staging(self._ends, job, me.instance_id)
        self._copies = CopyThread()
        self._ends.callback(self._copies.close)
        self._sender = KvSender(me, layout, staging)
        self._ends.push_async_callback(self._sender.close)
        await add_sender(self._ends, me, self._sender)
        size, buffer_bytes = positions * layout.bytes_per_position, job["buffer_bytes"]
        whole = _ReadableRing(job["transport"], 2, -(-size // ALIGNMENT) * ALIGNMENT)
        count = len(_chunks(positions, buffer_bytes, layout))
        self._kv_chunks = _ReadableRing(job["transport"], count, buffer_bytes)
        for exhibit in (whole, self._kv_chunks):
            self._ends.callback(exhibit.close)
            for index in range(exhibit.ring.num_buffers):
                exhibit.ring.view(index)[:] = os.urandom(exhibit.ring.buffer_bytes)
        return {
            "sender": asdict(me),
            "whole": whole.describe(),
            "kv_chunks": self._kv_chunks.describe(),
        }

    def _seal(self, positions: int) -> dict[str, Any]:
        ring = self._kv_chunks.ring
        me = self._kv_chunks.instance_id
        sealer = Sealer(SECRET, me, self._layout, ring.memory, self._digest)
        chunks = _chunks(positions, ring.buffer_bytes, self._layout)
        headers = [sealer.header(run) for run in chunks]
        for header in headers:
            sealer.seal(header, ring.view(header.index))
        return {"digests": [header.digest.hex() for header in headers]}
