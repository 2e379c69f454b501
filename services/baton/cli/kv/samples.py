"""Probes of one sender, one after the other, and timed reads of the buffer that a probe lies in.

All that a request's KV goes through is used: Collect, rings, transport, seal, verification; only
the bytes are known ones. A probe takes one buffer of the sender's, and what is read again is that
probe: nobody's KV.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from baton.core.errors import HandoverFailed
from baton.core.handover.messages import (
    Handshake,
    HandshakeRequest,
    KvChunkReady,
    ReceiverMessage,
    SenderMessage,
)
from baton.core.request.model import WorkerIdentity
from baton.transfer.grpc import GrpcCollectStream, GrpcSenderConnection
from baton.transfer.kv_chunk import HEADER_BYTES, PROBE_S, made_up
from baton.transfer.receiver import KvReceiver, TransferRequest
from baton.transfer.staging import StagingPool, TransportError
from baton.transfer.transports import Staging

READ_S = 5.0
MEASURE_S = 0.2
SLOW_S = 0.5
AT_ONCE = 4
"""As many reads as a hand-over has under way."""
SIZES = (64 << 10, 1 << 20, 4 << 20)


class Watched(GrpcSenderConnection):
    """The real connection; notes by which transport the two met and where a probe lies."""

    transport = ""
    buffer = 0

    async def meet(self, introduction: HandshakeRequest) -> Handshake:
        meeting = await super().meet(introduction)
        self.transport = meeting.transport
        return meeting

    def collect(self) -> GrpcCollectStream:
        return _WatchedStream(super().collect(), self)


class _WatchedStream(GrpcCollectStream):
    def __init__(self, stream: GrpcCollectStream, watched: Watched) -> None:
        self._stream, self._watched = stream, watched

    async def __aiter__(self) -> AsyncIterator[SenderMessage]:
        async for message in self._stream:
            if isinstance(message, KvChunkReady):
                self._watched.buffer = message.buffer
            yield message

    async def send(self, message: ReceiverMessage) -> None:
        await self._stream.send(message)

    async def close(self) -> None:
        await self._stream.close()


class Sampler:
    """positions: of a KV chunk. round_trip_s: median of reading a header. reads: per size the
    median time of one read, and the rate of several at once.
    """

    def __init__(
        self,
        sender: WorkerIdentity,
        positions: int,
        staging: Staging,
        connection: Watched,
        receiver: KvReceiver,
    ) -> None:
        self._sender, self._positions = sender, positions
        self._staging, self._connection, self._receiver = staging, connection, receiver
        self.kv_chunk_bytes = 0
        self.round_trip_s = 0.0
        self.reads: list[dict[str, Any]] = []

    async def kv_chunk(self, measure: bool = False) -> float:
        """Collects one and compares every byte. Seconds from opening the stream to the end.

        measure: reads it again and again before it is confirmed, while its buffer is held for us.
        Raises HandoverFailed and Incompatible.
        """
        handover_id = secrets.token_bytes(16)

        async def reserve() -> int:
            return 0

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            if payload != made_up(handover_id, first_position, len(payload)):
                raise HandoverFailed("a KV chunk verified, and its bytes are not the probe's")
            self.kv_chunk_bytes = HEADER_BYTES + len(payload)
            if measure:
                await self._measure()

        began = time.monotonic()
        ticket = TransferRequest(handover_id, self._sender, self._positions, PROBE_S, is_probe=True)
        await self._receiver.collect(ticket, reserve, unpack)
        return time.monotonic() - began

    async def _measure(self) -> None:
        try:
            self.round_trip_s, _ = await self._read(HEADER_BYTES, 1)
            for size in sorted(
                {*(s for s in SIZES if s < self.kv_chunk_bytes), self.kv_chunk_bytes}
            ):
                seconds, _ = await self._read(size, 1)
                _, rate = await self._read(size, AT_ONCE)
                self.reads.append({"bytes": size, "seconds": seconds, "bytes_per_s": rate})
                if seconds > SLOW_S:
                    return
        except TransportError as error:
            raise HandoverFailed(f"a KV chunk could be read once, not again: {error}") from None

    async def _read(self, size: int, at_once: int) -> tuple[float, float]:
        """Median seconds of a read, and bytes a second of all together."""
        ring, peer = self._staging.ring, self._sender.instance_id
        reader = self._staging.readers[self._connection.transport]
        began = time.monotonic()
        times: list[float] = []

        async def again() -> None:
            # In the doctor's own name: the share under the sender's is the hand-over's.
            buffer = await ring.wait("doctor")
            try:
                before = now = time.monotonic()
                while now - began < MEASURE_S or not times:
                    await reader.read(peer, self._connection.buffer, buffer, size, READ_S)
                    before, now = now, time.monotonic()
                    times.append(now - before)
            finally:
                buffer.release()

        await asyncio.gather(*(again() for _ in range(at_once)))
        return statistics.median(times), size * len(times) / (time.monotonic() - began)


def memcpy_rate(ring: StagingPool) -> float:
    """Bytes a second from buffer to buffer on this machine. Takes milliseconds; both are free."""
    source = np.frombuffer(ring.view(0), np.uint8)
    target = np.frombuffer(ring.view(1), np.uint8)
    times: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return ring.buffer_bytes / statistics.median(times)
