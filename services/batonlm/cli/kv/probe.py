"""Receives test chunks from a worker and prints facts and speeds as JSON lines.

`baton doctor kv` runs it as `python -m batonlm.cli.kv.probe JSON` in its own process, because UCX
ends a process in which it cannot work. `verdicts` judges what is printed here.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import numpy as np

from batonlm.core.errors import BatonError, HandoverFailed, Internal, Unavailable
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerDescription
from batonlm.rpc.channels import Channels
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.lifecycle import die_with_parent, new_instance_id
from batonlm.rpc.peers import PEER_TOKEN_VARIABLE
from batonlm.rpc.tls import Certificates
from batonlm.rpc.worker import description_from_proto
from batonlm.transfer.kv_chunk import HEADER_BYTES, PROBE_S, made_up, positions_per_kv_chunk
from batonlm.transfer.peers import CollectStream, SenderConnection, meet_request
from batonlm.transfer.receiver import KvReceiver, TransferRequest
from batonlm.transfer.staging import StagingPool, TransportError
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import KvNetwork, choose, inherited
from batonlm.v1 import handover_pb2 as pb
from batonlm.v1 import worker_pb2
from batonlm.v1.worker_pb2_grpc import WorkerStub

READ_S = 5.0
MEASURE_S = 0.2
SLOW_S = 0.5
AT_ONCE = 4
"""As many concurrent reads as a hand-over has."""
SIZES = (64 << 10, 1 << 20, 4 << 20)


class Watched(SenderConnection):
    """A connection that records the transport of the handshake and the buffer of a test chunk."""

    transport = ""
    buffer = 0

    async def meet(self, request: pb.MeetRequest) -> pb.MeetResponse:
        meeting = await super().meet(request)
        self.transport = meeting.transport
        return meeting

    def collect(self) -> CollectStream:
        return _WatchedStream(self._stub.Collect(), self)


class _WatchedStream(CollectStream):
    def __init__(self, call: Any, watched: Watched) -> None:
        super().__init__(call)
        self._watched = watched

    async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
        async for message in super().__aiter__():
            if message.HasField("kv_chunk"):
                self._watched.buffer = message.kv_chunk.buffer
            yield message


class Sampler:
    """Measures transfers. positions: number of positions in a KV chunk."""

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
        """Median time of reading a header."""
        self.reads: list[dict[str, Any]] = []
        """Per size, the median time of one read and the rate of several at once."""

    async def kv_chunk(self, measure: bool = False) -> float:
        """Receives one chunk and compares every byte. Returns the seconds from opening the stream
        to its end.

        measure: reads it repeatedly before confirming it, while the peer holds its buffer. Raises
        HandoverFailed and Incompatible.
        """
        handover_id = secrets.token_bytes(16)

        async def reserve() -> int:
            return 0

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            if payload.tobytes() != made_up(handover_id, first_position, payload.nbytes):
                raise HandoverFailed("a KV chunk verified, and its bytes are not the probe's")
            self.kv_chunk_bytes = HEADER_BYTES + payload.nbytes
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
        """Returns the median seconds of a read, and the bytes per second of all together."""
        ring, peer = self._staging.ring, self._sender.instance_id
        reader = self._staging.readers[self._connection.transport]
        began = time.monotonic()
        times: list[float] = []

        async def again() -> None:
            # Under the doctor's own name: the sender's share of buffers is the hand-over's.
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
    """Returns the bytes per second of a copy between two free buffers. Takes milliseconds."""
    source = np.frombuffer(ring.view(0), np.uint8)
    target = np.frombuffer(ring.view(1), np.uint8)
    times: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return ring.buffer_bytes / statistics.median(times)


ASK_S = 10.0
MEETINGS = 5
KV_CHUNKS = 8
LARGEST_BUFFER = 16 << 20

Report = Callable[..., None]


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """The task of a probe. Options are named as those of a worker."""

    peer: str
    """host:port of a worker."""
    kv_network: str
    transport: str = "auto"
    ucx_transports: tuple[str, ...] = ()
    ucx_devices: tuple[str, ...] = ()
    peer_role: str = ""
    tls: tuple[str, ...] = ()
    """Files of certificate, key and CA; none: plain text."""


async def probe(task: ProbeTask, report: Report) -> None:
    """Raises BatonError at the first failure; facts printed before it remain valid."""
    ucx = choose(
        KvNetwork(task.kv_network),
        transports=task.ucx_transports,
        devices=task.ucx_devices,
        inherited=inherited(),
    )
    async with AsyncExitStack() as ends:
        channels = Channels(
            Certificates(*task.tls) if task.tls else None,
            token=os.environ.get(PEER_TOKEN_VARIABLE, ""),
        )
        ends.push_async_callback(channels.close)
        channel = channels.get(task.peer, task.peer_role)
        peer = await _who(channel)
        report(peer={**asdict(peer.identity), "has_kv": peer.layout is not None})
        if peer.layout is None:
            return
        sender = replace(peer.identity, address=task.peer)
        me = WorkerIdentity("doctor", new_instance_id(), "")
        connection = Watched(channel)
        names = ("nixl", "loopback") if task.transport == "auto" else (task.transport,)
        network, ways = ucx.network.value, ucx.transports
        request = meet_request(me, peer.layout, names, sender.instance_id, ucx, ucx.network.digests)
        meeting, seconds = await _meet(connection, request)
        report(
            meeting={
                "seconds": seconds,
                "digest": meeting.digest,
                "buffer_bytes": meeting.ring.buffer_bytes,
                "kv_network": meeting.kv_network,
                "ucx_transports": tuple(meeting.ucx_transports),
            },
            ours={"kv_network": network, "ucx_transports": ways, "ucx_devices": ucx.devices},
        )
        staging = await Staging.open(
            me.instance_id,
            transport=task.transport,
            num_buffers=2 * AT_ONCE,
            buffer_bytes=min(meeting.ring.buffer_bytes, LARGEST_BUFFER),
            ucx=ucx,
        )
        ends.push_async_callback(staging.close)
        receiver = KvReceiver(me, peer.layout, staging, lambda _: connection)
        ends.push_async_callback(receiver.close)
        await receiver.meet(sender)
        report(transport=connection.transport)
        report(memcpy_bytes_per_s=await asyncio.to_thread(memcpy_rate, staging.ring))
        buffer_bytes = min(meeting.ring.buffer_bytes, staging.ring.buffer_bytes)
        positions = positions_per_kv_chunk(buffer_bytes, peer.layout)
        sampler = Sampler(sender, positions, staging, connection, receiver)
        times = [await sampler.kv_chunk() for _ in range(KV_CHUNKS)]
        report(
            kv_chunks={
                "count": KV_CHUNKS,
                "bytes": sampler.kv_chunk_bytes,
                "seconds": statistics.median(times),
            }
        )
        await sampler.kv_chunk(measure=True)
        report(round_trip_s=sampler.round_trip_s, reads=sampler.reads)


async def _who(channel: grpc.aio.Channel) -> WorkerDescription:
    """Returns the peer's description. Raises Unavailable, Unimplemented and other gRPC errors."""
    watch: Any = WorkerStub(channel).Watch(worker_pb2.WatchRequest())
    try:
        async with asyncio.timeout(ASK_S):
            first = await watch.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except TimeoutError:
        raise Unavailable("the peer did not answer in time") from None
    finally:
        watch.cancel()
    if first is grpc.aio.EOF or not first.HasField("description"):
        raise Internal("the peer does not say what it is")
    return description_from_proto(first.description)


async def _meet(connection: Watched, request: pb.MeetRequest) -> tuple[pb.MeetResponse, float]:
    """Returns the sender's response and the median time of several calls. The first one
    connects."""
    times: list[float] = []
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(ASK_S):
            for _ in range(MEETINGS):
                began = clock()
                meeting = await connection.meet(request)
                times.append(clock() - began)
    except TimeoutError:
        raise Unavailable("the peer did not answer in time") from None
    return meeting, statistics.median(times)


def _report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def main(task: ProbeTask) -> int:
    try:
        await probe(task, _report)
    except BatonError as error:
        _report(error={"reason": error.reason.name, "message": error.message, "field": error.field})
        return 0
    _report(done=True)
    return 0


if __name__ == "__main__":
    die_with_parent()
    given = json.loads(sys.argv[1])
    for listed in ("ucx_transports", "ucx_devices"):
        given[listed] = tuple(given[listed])
    sys.exit(asyncio.run(main(ProbeTask(**given))))
