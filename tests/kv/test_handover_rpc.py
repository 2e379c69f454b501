"""The gRPC ends of hand-overs: messages cross unchanged, and broken streams are Unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from batonlm.core.errors import HandoverFailed, Incompatible, Unavailable
from batonlm.rpc.convert import error_from_proto
from batonlm.rpc.errors import ErrorInterceptor
from batonlm.transfer.peers import CollectStream, SenderConnection
from batonlm.transfer.sender import KvSender, Send
from batonlm.v1 import handover_pb2 as pb
from batonlm.v1 import types_pb2
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server
from tests.kv.rig import rig

MEETING = pb.MeetResponse(
    transport="nixl",
    transport_metadata=b"\x00\xff",
    ring=pb.StagingPoolDescription(base_address=2**47 + 4096, memory_kind="VRAM"),
    ucx_transports=("self", "rc"),
)
HEARTBEAT = pb.CollectRequest(heartbeat=pb.HandoverHeartbeat())
COMPLETED = pb.CollectRequest(completed=pb.HandoverCompleted())
ANNOUNCED = pb.CollectResponse(announced=pb.HandoverAnnounced(num_positions=3))
TO_SENDER = [
    pb.CollectRequest(open=pb.OpenHandover(handover_id=bytes(16), max_kv_chunk_bytes=2**33)),
    pb.CollectRequest(granted=pb.HandoverGranted()),
    pb.CollectRequest(full=pb.HandoverFull()),
    COMPLETED,
]
TO_RECEIVER = [
    ANNOUNCED,
    pb.CollectResponse(kv_chunk=pb.KvChunkReady(header=pb.KvChunkHeader(index=7), buffer=11)),
    pb.CollectResponse(failed=types_pb2.Error(message="the client left")),
]


class Scripted(KvSender):
    """A sender that records everything, sends its lines, and then does as its last one says."""

    def __init__(self, lines: list[pb.CollectResponse], ending: str = "ends") -> None:
        self.lines, self.ending = lines, ending
        self.received: list[pb.CollectRequest] = []
        self.broken: Exception | None = None
        self.request: pb.MeetRequest | None = None
        self.over = asyncio.Event()

    def meet(self, request: pb.MeetRequest) -> pb.MeetResponse:
        self.request = request
        if request.receiver.role == "router":
            raise Incompatible("routers hold no KV")
        return MEETING

    async def serve(self, incoming: AsyncIterator[pb.CollectRequest], send: Send) -> None:
        try:
            for line in self.lines:
                await send(line)
            if self.ending == "listens":
                async for message in incoming:
                    self.received.append(message)
            if self.ending == "talks":
                while True:
                    await send(pb.CollectResponse(heartbeat=pb.HandoverHeartbeat()))
                    await asyncio.sleep(0.01)
        except Exception as error:
            self.broken = error
        finally:
            self.over.set()


@asynccontextmanager
async def connected(sender: Scripted) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Server]]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    add_HandoverServicer_to_server(sender, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, server
    finally:
        await server.stop(None)


async def test_a_meeting_crosses_unchanged() -> None:
    sender = Scripted([])
    request = pb.MeetRequest(transports=("nixl", "loopback"), kv_network="isolated")
    async with connected(sender) as (channel, _):
        assert await SenderConnection(channel).meet(request) == MEETING
    assert sender.request == request


async def test_a_refused_meeting_raises_what_the_sender_raised() -> None:
    router = pb.MeetRequest(receiver=types_pb2.WorkerIdentity(role="router"))
    async with connected(Scripted([])) as (channel, _):
        with pytest.raises(Incompatible, match="routers hold no KV"):
            await SenderConnection(channel).meet(router)


async def test_messages_cross_unchanged() -> None:
    sender = Scripted(TO_RECEIVER, "listens")
    async with connected(sender) as (channel, _):
        stream = SenderConnection(channel).collect()
        for message in TO_SENDER:
            await stream.send(message)
        answers = aiter(stream)
        assert [await anext(answers) for _ in TO_RECEIVER] == TO_RECEIVER
        await stream.close()
        await sender.over.wait()
    assert sender.received == TO_SENDER and sender.broken is None


async def test_the_streams_end_ends_the_iteration() -> None:
    async with connected(Scripted([ANNOUNCED])) as (channel, _):
        stream = SenderConnection(channel).collect()
        assert [message async for message in stream] == [ANNOUNCED]
        await stream.close()
        with pytest.raises(Unavailable):
            await stream.send(HEARTBEAT)


async def test_the_reader_may_be_cancelled_without_ending_the_stream() -> None:
    sender = Scripted([], "listens")
    async with connected(sender) as (channel, _):
        stream = SenderConnection(channel).collect()
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait([reading])
        await stream.send(COMPLETED)
        await stream.close()
        await sender.over.wait()
    assert sender.received == [COMPLETED] and sender.broken is None


async def test_a_dead_server_is_unavailable() -> None:
    async with connected(Scripted([ANNOUNCED], "listens")) as (channel, server):
        stream = SenderConnection(channel).collect()
        answers = aiter(stream)
        assert await anext(answers) == ANNOUNCED
        await server.stop(None)
        with pytest.raises(Unavailable):
            await anext(answers)
        with pytest.raises(Unavailable):
            await stream.send(HEARTBEAT)
        await stream.close()


@pytest.mark.parametrize("ending", ["listens", "talks"])
async def test_a_receiver_that_vanishes_ends_the_senders_work(ending: str) -> None:
    sender = Scripted([ANNOUNCED], ending)
    async with connected(sender) as (channel, _):
        stream = SenderConnection(channel).collect()
        assert await anext(aiter(stream)) == ANNOUNCED
        await channel.close()
        async with asyncio.timeout(120):
            await sender.over.wait()
        await stream.close()


async def test_closing_is_bounded_although_the_sender_goes_on_talking() -> None:
    sender = Scripted([], "talks")
    async with connected(sender) as (channel, _):
        stream: CollectStream = SenderConnection(channel).collect()
        await anext(aiter(stream))
        async with asyncio.timeout(120):
            await stream.close()
            await sender.over.wait()


async def test_a_sender_that_leaves_while_it_is_written_to_has_left() -> None:
    """gRPC calls that an internal error, as if it were a fault of ours.

    What the reader meets depends on who was first, the sender's end or our write: both are an end.
    """
    sender = Scripted([], "ends")
    async with connected(sender) as (channel, _):
        stream = SenderConnection(channel).collect()
        async with asyncio.timeout(120):
            with pytest.raises(Unavailable, match="the sender left"):
                while True:
                    await stream.send(HEARTBEAT)
            with suppress(Unavailable):
                async for _ in stream:
                    pass
        await stream.close()


async def test_an_empty_message_is_a_fault() -> None:
    async with rig() as world:
        sent: list[pb.CollectResponse] = []

        async def incoming() -> AsyncIterator[pb.CollectRequest]:
            yield pb.CollectRequest()
            await asyncio.get_running_loop().create_future()

        async def send(message: pb.CollectResponse) -> None:
            sent.append(message)

        async with asyncio.timeout(120):
            await world.sender.serve(incoming(), send)
        (failed,) = (message.failed for message in sent if message.HasField("failed"))
        assert isinstance(error_from_proto(failed), HandoverFailed)
        assert "empty or unknown" in failed.message
