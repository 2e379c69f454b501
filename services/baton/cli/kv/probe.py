"""Collects probes from a worker and tells, in JSON lines, what it met and how fast it was.

Run by `baton doctor kv` as `python -m baton.cli.kv.probe JSON`, in a process of its own, because
UCX ends a process that it cannot work in. Judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc

from baton.cli.kv.samples import AT_ONCE, Sampler, Watched, memcpy_rate
from baton.core.errors import BatonError, Internal, Unavailable
from baton.core.handover.messages import Handshake, HandshakeRequest
from baton.core.request.model import WorkerIdentity
from baton.core.routing.load import WorkerDescription
from baton.rpc.channels import Channels
from baton.rpc.errors import from_rpc_error
from baton.rpc.lifecycle import die_with_parent, new_instance_id
from baton.rpc.peer_token import VARIABLE
from baton.rpc.tls import Certificates
from baton.rpc.worker import description_from_proto
from baton.transfer.kv_chunk import positions_per_kv_chunk
from baton.transfer.receiver import KvReceiver
from baton.transfer.transports import Staging
from baton.transfer.ucx import KvNetwork, choose, inherited
from baton.v1 import worker_pb2
from baton.v1.worker_pb2_grpc import WorkerStub

ASK_S = 10.0
MEETINGS = 5
KV_CHUNKS = 8
LARGEST_BUFFER = 16 << 20

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Task:
    """peer: host:port of a worker. The rest is as a worker's options name it."""

    peer: str
    kv_network: str
    transport: str = "auto"
    ucx_transports: tuple[str, ...] = ()
    ucx_devices: tuple[str, ...] = ()
    peer_role: str = ""
    tls: tuple[str, ...] = ()
    """Files of certificate, key and CA; none: plain text."""


async def probe(task: Task, tell: Tell) -> None:
    """Raises BatonError at the first thing that fails; what was told before stands."""
    ucx = choose(
        KvNetwork(task.kv_network),
        transports=task.ucx_transports,
        devices=task.ucx_devices,
        inherited=inherited(),
    )
    async with AsyncExitStack() as ends:
        channels = Channels(
            Certificates(*task.tls) if task.tls else None, token=os.environ.get(VARIABLE, "")
        )
        ends.push_async_callback(channels.close)
        channel = channels.get(task.peer, task.peer_role)
        peer = await _who(channel)
        tell(peer={**asdict(peer.identity), "has_kv": peer.layout is not None})
        if peer.layout is None:
            return
        sender = replace(peer.identity, address=task.peer)
        me = WorkerIdentity("doctor", new_instance_id(), "")
        connection = Watched(channel)
        names = ("nixl", "loopback") if task.transport == "auto" else (task.transport,)
        network, ways = ucx.network.value, ucx.transports
        introduction = HandshakeRequest(me, peer.layout, names, sender.instance_id, network, ways)
        meeting, seconds = await _meet(connection, introduction)
        tell(
            meeting={
                "seconds": seconds,
                "digest": meeting.digest,
                "buffer_bytes": meeting.ring.buffer_bytes,
                "kv_network": meeting.kv_network,
                "ucx_transports": meeting.ucx_transports,
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
        tell(transport=connection.transport)
        tell(memcpy_bytes_per_s=await asyncio.to_thread(memcpy_rate, staging.ring))
        buffer_bytes = min(meeting.ring.buffer_bytes, staging.ring.buffer_bytes)
        positions = positions_per_kv_chunk(buffer_bytes, peer.layout)
        sampler = Sampler(sender, positions, staging, connection, receiver)
        times = [await sampler.kv_chunk() for _ in range(KV_CHUNKS)]
        tell(
            kv_chunks={
                "count": KV_CHUNKS,
                "bytes": sampler.kv_chunk_bytes,
                "seconds": statistics.median(times),
            }
        )
        await sampler.kv_chunk(measure=True)
        tell(round_trip_s=sampler.round_trip_s, reads=sampler.reads)


async def _who(channel: grpc.aio.Channel) -> WorkerDescription:
    """What answers there. Raises Unavailable, Unimplemented and what else a stranger answers."""
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


async def _meet(connection: Watched, introduction: HandshakeRequest) -> tuple[Handshake, float]:
    """The sender's answer and the median time of several. The first one connects."""
    times: list[float] = []
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(ASK_S):
            for _ in range(MEETINGS):
                began = clock()
                meeting = await connection.meet(introduction)
                times.append(clock() - began)
    except TimeoutError:
        raise Unavailable("the peer did not answer in time") from None
    return meeting, statistics.median(times)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def main(task: Task) -> int:
    try:
        await probe(task, _tell)
    except BatonError as error:
        _tell(error={"reason": error.reason.name, "message": error.message, "field": error.field})
        return 0
    _tell(done=True)
    return 0


if __name__ == "__main__":
    die_with_parent()
    given = json.loads(sys.argv[1])
    for listed in ("ucx_transports", "ucx_devices"):
        given[listed] = tuple(given[listed])
    sys.exit(asyncio.run(main(Task(**given))))
