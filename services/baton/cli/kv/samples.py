"""Probes of one giver, one after the other, and timed reads of the slot that a probe lies in.

All that a request's KV goes through is used: Collect, rings, transport, seal, verification; only
the bytes are known ones. A probe takes one slot of the giver's, and what is read again is that
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
from baton.core.handover_messages import (
    CollectorMessage,
    GiverMessage,
    Introduction,
    Meeting,
    ParcelReady,
)
from baton.core.model import WorkerIdentity
from baton.kv.collector import Collector, Ticket
from baton.kv.made_up import PROBE_S, made_up
from baton.kv.parcel import HEADER_BYTES
from baton.kv.slots import SlotRing
from baton.kv.staging import Staging
from baton.kv.transport import TransportError
from baton.rpc.handover import GrpcCollectStream, GrpcGiverConnection

READ_S = 5.0
MEASURE_S = 0.2
SLOW_S = 0.5
AT_ONCE = 4
"""As many reads as a hand-over has under way."""
SIZES = (64 << 10, 1 << 20, 4 << 20)


class Watched(GrpcGiverConnection):
    """The real connection; notes by which transport the two met and where a probe lies."""

    transport = ""
    slot = 0

    async def meet(self, introduction: Introduction) -> Meeting:
        meeting = await super().meet(introduction)
        self.transport = meeting.transport
        return meeting

    def collect(self) -> GrpcCollectStream:
        return _WatchedStream(super().collect(), self)


class _WatchedStream(GrpcCollectStream):
    def __init__(self, stream: GrpcCollectStream, watched: Watched) -> None:
        self._stream, self._watched = stream, watched

    async def __aiter__(self) -> AsyncIterator[GiverMessage]:
        async for message in self._stream:
            if isinstance(message, ParcelReady):
                self._watched.slot = message.slot
            yield message

    async def send(self, message: CollectorMessage) -> None:
        await self._stream.send(message)

    async def close(self) -> None:
        await self._stream.close()


class Sampler:
    """positions: of a parcel. round_trip_s: median of reading a header. reads: per size the median
    time of one read, and the rate of several at once.
    """

    def __init__(
        self,
        giver: WorkerIdentity,
        positions: int,
        staging: Staging,
        connection: Watched,
        collector: Collector,
    ) -> None:
        self._giver, self._positions = giver, positions
        self._staging, self._connection, self._collector = staging, connection, collector
        self.parcel_bytes = 0
        self.round_trip_s = 0.0
        self.reads: list[dict[str, Any]] = []

    async def parcel(self, measure: bool = False) -> float:
        """Collects one and compares every byte. Seconds from opening the stream to the end.

        measure: reads it again and again before it is confirmed, while its slot is held for us.
        Raises HandoverFailed and Incompatible.
        """
        handover_id = secrets.token_bytes(16)

        async def reserve() -> int:
            return 0

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            if payload != made_up(handover_id, first_position, len(payload)):
                raise HandoverFailed("a parcel verified, and its bytes are not the probe's")
            self.parcel_bytes = HEADER_BYTES + len(payload)
            if measure:
                await self._measure()

        began = time.monotonic()
        ticket = Ticket(handover_id, self._giver, self._positions, PROBE_S, is_probe=True)
        await self._collector.collect(ticket, reserve, unpack)
        return time.monotonic() - began

    async def _measure(self) -> None:
        try:
            self.round_trip_s, _ = await self._read(HEADER_BYTES, 1)
            for size in sorted({*(s for s in SIZES if s < self.parcel_bytes), self.parcel_bytes}):
                seconds, _ = await self._read(size, 1)
                _, rate = await self._read(size, AT_ONCE)
                self.reads.append({"bytes": size, "seconds": seconds, "bytes_per_s": rate})
                if seconds > SLOW_S:
                    return
        except TransportError as error:
            raise HandoverFailed(f"a parcel could be read once, not again: {error}") from None

    async def _read(self, size: int, at_once: int) -> tuple[float, float]:
        """Median seconds of a read, and bytes a second of all together."""
        ring, peer = self._staging.ring, self._giver.incarnation
        reader = self._staging.readers[self._connection.transport]
        began = time.monotonic()
        times: list[float] = []

        async def again() -> None:
            # In the doctor's own name: the share under the giver's is the hand-over's.
            slot = await ring.wait("doctor")
            try:
                before = now = time.monotonic()
                while now - began < MEASURE_S or not times:
                    await reader.read(peer, self._connection.slot, slot, size, READ_S)
                    before, now = now, time.monotonic()
                    times.append(now - before)
            finally:
                slot.release()

        await asyncio.gather(*(again() for _ in range(at_once)))
        return statistics.median(times), size * len(times) / (time.monotonic() - began)


def memcpy_rate(ring: SlotRing) -> float:
    """Bytes a second from slot to slot on this machine. Takes some milliseconds; both are free."""
    source = np.frombuffer(ring.view(0), np.uint8)
    target = np.frombuffer(ring.view(1), np.uint8)
    times: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return ring.slot_bytes / statistics.median(times)
