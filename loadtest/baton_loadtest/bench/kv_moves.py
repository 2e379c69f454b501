"""One transport's hand-overs at several sizes, from buffer to buffer up to the whole; runs as a
job.

This process collects from one that gives, over real gRPC and the real transport. Nothing computes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from baton.core.kvcache.block_pool import Extents
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.engine.kv.cache import KvCache
from baton.engine.thread import CopyThread
from baton.rpc.channels import Channels
from baton.rpc.loop import Loop
from baton.transfer.grpc import GrpcSenderConnection
from baton.transfer.kv_chunk import HEADER_BYTES, Sealer
from baton.transfer.receiver import MAX_IN_FLIGHT, READ_S, KvReceiver, TransferRequest
from baton.transfer.staging import ReadState, StagingPool
from baton.transfer.transports import Staging
from baton.v1 import handover_pb2 as pb
from baton_loadtest.bench.beside import Beside
from baton_loadtest.bench.child import progress
from baton_loadtest.bench.kv_ends import described, identity, open_transport
from baton_loadtest.bench.kv_parts import SECRET, Parts, medians, memory, positions_of, runs, use

RAW = "raw"


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: transport, layout, sizes (megabytes), num_buffers, buffer_bytes, digest, sender_core
    (None: not pinned), buffers (whether buffer to buffer is measured too).

    Returns by size, as a string, the median seconds of: raw (one read of all of it), memcpy,
    buffers (buffer to buffer, verified), pack, seal, verify, unpack (each alone), pools (pool to
    pool, from the grant on), whole (peers that have met), first (peers that have not), nothing (a
    hand-over of which all is there already, from the grant on).
    """
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(_measure(job))


async def _measure(job: dict[str, Any]) -> dict[str, Any]:
    layout = KvLayout(**job["layout"])
    largest = max(positions_of(size, layout) for size in job["sizes"])
    measured: dict[str, Any] = {}
    async with AsyncExitStack() as ends:
        sender = await Beside.start("kv_sender", job["sender_core"])
        ends.push_async_callback(sender.close)
        hello = await sender.ask(
            positions=largest,
            **{
                key: job[key]
                for key in ("transport", "layout", "num_buffers", "buffer_bytes", "digest")
            },
        )
        digest = use(job["digest"])
        whole = _Whole(job["transport"], hello["whole"])
        ends.callback(whole.close)
        parts = Parts(layout, largest, job["buffer_bytes"], digest)
        buffers = await _Buffers.open(ends, job, layout, sender, hello["kv_chunks"], digest)
        pools = await _Pools.open(ends, job, layout, sender, hello["sender"], largest)
        for size in job["sizes"]:
            positions = positions_of(size, layout)
            num_bytes = positions * layout.bytes_per_position
            cases: dict[str, Callable[[], Any]] = {
                RAW: partial(whole.read, num_bytes),
                "memcpy": partial(whole.copy, num_bytes),
                "pools": partial(pools.granted, positions),
                "whole": partial(pools.collected, positions),
                "first": partial(pools.met_and_collected, positions),
                "nothing": partial(pools.granted, positions, cached=positions),
            }
            if job["buffers"]:
                await buffers.seal(positions)
                cases["buffers"] = buffers.read
            found = await medians(cases)
            measured[str(size)] = {**found, **parts.spent(positions), "bytes": num_bytes}
            progress(f"{job['transport']}, {job['digest']}: {size} MB")
    return measured


class _Whole:
    """One read of everything, as the transport alone does it, polled without a pause."""

    def __init__(self, transport: str, exhibit: dict[str, Any]) -> None:
        import numpy as np

        self._peer, metadata, theirs = described(exhibit)
        self._ring = StagingPool(2, theirs.buffer_bytes)
        self._transport = open_transport(transport, self._ring, secrets.token_hex(16))
        self._transport.add_peer(self._peer, metadata, theirs)
        self._np = np

    async def read(self, num_bytes: int) -> float:
        began = time.perf_counter()
        handle = self._transport.post(self._peer, 0, 0, num_bytes)
        while (state := self._transport.poll(handle)) is ReadState.RUNNING:
            pass
        self._transport.release(handle)
        seconds = time.perf_counter() - began
        assert state is ReadState.DONE
        return seconds

    async def copy(self, num_bytes: int) -> float:
        """From one buffer of ours to the other."""
        source, target = (
            self._np.frombuffer(self._ring.view(index), self._np.uint8, num_bytes)
            for index in (1, 0)
        )
        began = time.perf_counter()
        self._np.copyto(target, source)
        return time.perf_counter() - began

    def close(self) -> None:
        self._transport.close()
        self._ring.close()


class _Buffers:
    """Reads sealed KV chunks into landing buffers and verifies them, a few at once."""

    def __init__(
        self, staging: Staging, layout: KvLayout, sender: Beside, peer: str, digest: str
    ) -> None:
        self._staging, self._layout, self._sender, self._peer = staging, layout, sender, peer
        self._sealer = Sealer(SECRET, peer, layout, digest)
        self._headers: list[pb.KvChunkHeader] = []
        (self._reader,) = staging.readers.values()

    @classmethod
    async def open(
        cls,
        ends: AsyncExitStack,
        job: dict[str, Any],
        layout: KvLayout,
        sender: Beside,
        exhibit: dict[str, Any],
        digest: str,
    ) -> _Buffers:
        staging = await _staging(ends, job, secrets.token_hex(16))
        peer, metadata, ring = described(exhibit)
        made = cls(staging, layout, sender, peer, digest)
        await made._reader.add_peer(peer, metadata, ring)
        return made

    async def seal(self, positions: int) -> None:
        """Has the sender put so many positions into its buffers."""
        digests = (await self._sender.ask(seal=positions))["digests"]
        kv_chunks = runs(positions, self._staging.ring.buffer_bytes, self._layout)
        self._headers = [self._sealer.header(run) for run in kv_chunks]
        for header, digest in zip(self._headers, digests, strict=True):
            header.digest = bytes.fromhex(digest)

    async def read(self) -> float:
        window = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def land(remote_buffer: int, header: pb.KvChunkHeader) -> None:
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
    """Collects from the sender's pool into one of ours."""

    def __init__(
        self,
        receiver: KvReceiver,
        channels: Channels,
        me: WorkerIdentity,
        sender: Beside,
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
        sender: Beside,
        them: dict[str, Any],
        positions: int,
    ) -> _Pools:
        me = identity("decode")
        staging = await _staging(ends, job, me.instance_id)
        channels = Channels()
        ends.push_async_callback(channels.close)
        receiver = KvReceiver(
            me, layout, staging, lambda peer: GrpcSenderConnection(channels.get(peer.address))
        )
        ends.push_async_callback(receiver.close)
        place = memory(layout, positions)
        made = cls(receiver, channels, me, sender, WorkerIdentity(**them), place)
        ends.callback(made._copies.close)
        return made

    async def granted(self, positions: int, cached: int = 0) -> float:
        """Seconds from our grant to the last byte in our pool."""
        _, granted, ended = await self._collect(positions, cached)
        return ended - granted

    async def collected(self, positions: int) -> float:
        """Seconds of all of it, with a sender that we have met."""
        began, _, ended = await self._collect(positions, 0)
        return ended - began

    async def met_and_collected(self, positions: int) -> float:
        """Seconds of all of it, with a sender that we know the address of, no more."""
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

        while not self._receiver.idle:  # noqa: ASYNC110  # nobody tells that farewells are over
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        await self._receiver.collect(
            TransferRequest(handover_id, self._them, positions), reserve, unpack
        )
        return began, granted, time.perf_counter()


async def _staging(ends: AsyncExitStack, job: dict[str, Any], instance_id: str) -> Staging:
    staging = await Staging.open(
        instance_id,
        transport=job["transport"],
        num_buffers=job["num_buffers"],
        buffer_bytes=job["buffer_bytes"],
    )
    ends.push_async_callback(staging.close)
    return staging
