"""The gRPC edge of hand-overs: messages cross unchanged, and broken streams are Unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from baton.core.errors import Cancelled, HandoverFailed, Incompatible, Unavailable
from baton.core.handover.messages import (
    Announced,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    Granted,
    Handshake,
    HandshakeRequest,
    Heartbeat,
    KvChunkCollected,
    KvChunkHeader,
    KvChunkReady,
    OpenHandover,
    ReceiverMessage,
    SenderMessage,
    StagingPoolDescription,
    Tokens,
)
from baton.core.request.attempt import ChoiceTokens, Logprobs, SequenceKey
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.core.request.request import FinishReason
from baton.rpc.interceptors import ErrorInterceptor
from baton.transfer.grpc import GrpcCollectStream, GrpcSenderConnection, HandoverServicer
from baton.v1 import handover_pb2 as pb
from baton.v1.handover_pb2_grpc import HandoverStub, add_HandoverServicer_to_server

LAYOUT = KvLayout("ab" * 32, "bfloat16", 4, 2, 64, 32, 1, 3)
RECEIVER = WorkerIdentity("decode", "c" * 32, "10.0.0.1:9000")
SENDER = WorkerIdentity("prefill", "a" * 32, "10.0.0.2:9000")
MEETING = Handshake(
    SENDER,
    LAYOUT,
    "nixl",
    b"\x00\xff",
    StagingPoolDescription(2**47 + 4096, 1 << 20, 16, 3, "VRAM"),
    "blake2b",
    "isolated",
    ("self", "rc"),
)
HEADER = KvChunkHeader("a" * 32, bytes(range(16)), 7, 100, 20, 0, 4, 0, 2, 2**33, b"d" * 16)
KEY = SequenceKey("request", 2, 5)
RECEIVER_MESSAGES: list[ReceiverMessage] = [
    OpenHandover(bytes(range(16)), RECEIVER, "a" * 32, 2**33),
    OpenHandover(bytes(range(16)), RECEIVER, "a" * 32, 2**33, 3, 2),
    Granted(0),
    Granted(4096),
    Full(),
    Credit(3),
    KvChunkCollected(0),
    KvChunkCollected(9),
    Completed(),
    Heartbeat(),
]
SENDER_MESSAGES: list[SenderMessage] = [
    Announced(1),
    Finished(2**31),
    KvChunkReady(HEADER, 11),
    Tokens((ChoiceTokens(KEY, 3, (9,), (Logprobs(-0.5, ((9, -0.5),)),), FinishReason.STOP, 9),)),
    Heartbeat(),
]


class Scripted:
    """A sender that hears everything, says its lines, and then does as its last one tells it."""

    def __init__(self, lines: list[SenderMessage], ending: str = "ends") -> None:
        self.lines, self.ending = lines, ending
        self.heard: list[ReceiverMessage] = []
        self.broken: Exception | None = None
        self.introduction: HandshakeRequest | None = None
        self.over = asyncio.Event()

    def meet(self, introduction: HandshakeRequest) -> Handshake:
        self.introduction = introduction
        if introduction.receiver.role == "router":
            raise Incompatible("routers hold no KV")
        return MEETING

    async def serve(
        self,
        incoming: AsyncIterator[ReceiverMessage],
        send: Callable[[SenderMessage], Awaitable[None]],
    ) -> None:
        try:
            for line in self.lines:
                await send(line)
            if self.ending == "listens":
                async for message in incoming:
                    self.heard.append(message)
            if self.ending == "talks":
                while True:
                    await send(Heartbeat())
                    await asyncio.sleep(0.01)
        except Exception as error:
            self.broken = error
        finally:
            self.over.set()


@asynccontextmanager
async def connected(sender: Scripted) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Server]]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    add_HandoverServicer_to_server(HandoverServicer(sender), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, server
    finally:
        await server.stop(None)


async def test_a_meeting_crosses_unchanged() -> None:
    sender = Scripted([])
    introduction = HandshakeRequest(
        RECEIVER, LAYOUT, ("nixl", "loopback"), "a" * 32, "isolated", ("tcp", "self")
    )
    async with connected(sender) as (channel, _):
        assert await GrpcSenderConnection(channel).meet(introduction) == MEETING
    assert sender.introduction == introduction


async def test_a_refused_meeting_raises_what_the_sender_raised() -> None:
    router = WorkerIdentity("router", "c" * 32, "")
    async with connected(Scripted([])) as (channel, _):
        with pytest.raises(Incompatible, match="routers hold no KV"):
            await GrpcSenderConnection(channel).meet(HandshakeRequest(router, LAYOUT, (), ""))


async def test_every_message_crosses_unchanged() -> None:
    sender = Scripted(SENDER_MESSAGES, "listens")
    async with connected(sender) as (channel, _):
        stream = GrpcSenderConnection(channel).collect()
        for message in RECEIVER_MESSAGES:
            await stream.send(message)
        told = aiter(stream)
        assert [await anext(told) for _ in SENDER_MESSAGES] == SENDER_MESSAGES
        await stream.close()
        await sender.over.wait()
    assert sender.heard == RECEIVER_MESSAGES and sender.broken is None


async def test_failures_cross_with_their_kind_and_text() -> None:
    error = Cancelled("the client left", retry_after_s=2.0)
    sender = Scripted([Failed(error)], "listens")
    async with connected(sender) as (channel, _):
        stream = GrpcSenderConnection(channel).collect()
        await stream.send(Failed(error))
        told = await anext(aiter(stream))
        await stream.close()
        await sender.over.wait()
    for message in (told, sender.heard[0]):
        assert isinstance(message, Failed) and isinstance(message.error, Cancelled)
        assert message.error.message == "the client left"
        assert message.error.retry_after_s == 2.0


async def test_the_streams_end_ends_the_iteration() -> None:
    async with connected(Scripted([Announced(3)])) as (channel, _):
        stream = GrpcSenderConnection(channel).collect()
        assert [message async for message in stream] == [Announced(3)]
        await stream.close()
        with pytest.raises(Unavailable):
            await stream.send(Heartbeat())


async def test_the_reader_may_be_cancelled_without_ending_the_stream() -> None:
    sender = Scripted([], "listens")
    async with connected(sender) as (channel, _):
        stream = GrpcSenderConnection(channel).collect()
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait([reading])
        await stream.send(Completed())
        await stream.close()
        await sender.over.wait()
    assert sender.heard == [Completed()] and sender.broken is None


async def test_a_dead_server_is_unavailable() -> None:
    async with connected(Scripted([Announced(3)], "listens")) as (channel, server):
        stream = GrpcSenderConnection(channel).collect()
        told = aiter(stream)
        assert await anext(told) == Announced(3)
        await server.stop(None)
        with pytest.raises(Unavailable):
            await anext(told)
        with pytest.raises(Unavailable):
            await stream.send(Heartbeat())
        await stream.close()


@pytest.mark.parametrize("ending", ["listens", "talks"])
async def test_a_receiver_that_vanishes_ends_the_senders_work(ending: str) -> None:
    sender = Scripted([Announced(3)], ending)
    async with connected(sender) as (channel, _):
        stream = GrpcSenderConnection(channel).collect()
        assert await anext(aiter(stream)) == Announced(3)
        await channel.close()
        async with asyncio.timeout(20):
            await sender.over.wait()
        await stream.close()


async def test_closing_is_bounded_although_the_sender_goes_on_talking() -> None:
    sender = Scripted([], "talks")
    async with connected(sender) as (channel, _):
        stream: GrpcCollectStream = GrpcSenderConnection(channel).collect()
        await anext(aiter(stream))
        async with asyncio.timeout(20):
            await stream.close()
            await sender.over.wait()


async def test_a_sender_that_leaves_while_it_is_written_to_has_left() -> None:
    """gRPC calls that an internal error, as if it were a fault of ours.

    What the reader meets depends on who was first, the sender's end or our write: both are an end.
    """
    sender = Scripted([], "ends")
    async with connected(sender) as (channel, _):
        stream = GrpcSenderConnection(channel).collect()
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable, match="the sender left"):
                while True:
                    await stream.send(Heartbeat())
            with suppress(Unavailable):
                async for _ in stream:
                    pass
        await stream.close()


async def test_an_empty_message_from_either_side_is_a_fault() -> None:
    sender = Scripted([], "listens")
    async with connected(sender) as (channel, _):
        call = HandoverStub(channel).Collect()
        await call.write(pb.CollectRequest())
        await call.done_writing()
        await sender.over.wait()
    assert isinstance(sender.broken, HandoverFailed)
