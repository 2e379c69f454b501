"""The gRPC edge of hand-overs: messages cross unchanged, and broken streams are Unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from baton.core.attempt import ChoiceTokens, Logprobs, SequenceKey
from baton.core.errors import Cancelled, HandoverFailed, Incompatible, Unavailable
from baton.core.handover_messages import (
    Announced,
    CollectorMessage,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    GiverMessage,
    Granted,
    Heartbeat,
    Introduction,
    Meeting,
    OpenHandover,
    ParcelCollected,
    ParcelHeader,
    ParcelReady,
    RingDescription,
    Tokens,
)
from baton.core.model import KvLayout, WorkerIdentity
from baton.core.request import FinishReason
from baton.rpc.handover import GrpcCollectStream, GrpcGiverConnection, HandoverServicer
from baton.rpc.interceptors import ErrorInterceptor
from baton.v1 import handover_pb2 as pb
from baton.v1.handover_pb2_grpc import HandoverStub, add_HandoverServicer_to_server

LAYOUT = KvLayout("ab" * 32, "bfloat16", 4, 2, 64, 32, 1, 3)
COLLECTOR = WorkerIdentity("decode", "c" * 32, "10.0.0.1:9000")
GIVER = WorkerIdentity("prefill", "a" * 32, "10.0.0.2:9000")
MEETING = Meeting(
    GIVER,
    LAYOUT,
    "nixl",
    b"\x00\xff",
    RingDescription(2**47 + 4096, 1 << 20, 16, 3, "VRAM"),
    "blake2b",
    "isolated",
    ("self", "rc"),
)
HEADER = ParcelHeader("a" * 32, bytes(range(16)), 7, 100, 20, 0, 4, 0, 2, 2**33, b"d" * 16)
KEY = SequenceKey("request", 2, 5)
COLLECTOR_MESSAGES: list[CollectorMessage] = [
    OpenHandover(bytes(range(16)), COLLECTOR, "a" * 32, 2**33),
    OpenHandover(bytes(range(16)), COLLECTOR, "a" * 32, 2**33, 3, 2),
    Granted(0),
    Granted(4096),
    Full(),
    Credit(3),
    ParcelCollected(0),
    ParcelCollected(9),
    Completed(),
    Heartbeat(),
]
GIVER_MESSAGES: list[GiverMessage] = [
    Announced(1),
    Finished(2**31),
    ParcelReady(HEADER, 11),
    Tokens((ChoiceTokens(KEY, 3, (9,), (Logprobs(-0.5, ((9, -0.5),)),), FinishReason.STOP, 9),)),
    Heartbeat(),
]


class Scripted:
    """A giver that hears everything, says its lines, and then does as its last one tells it."""

    def __init__(self, lines: list[GiverMessage], ending: str = "ends") -> None:
        self.lines, self.ending = lines, ending
        self.heard: list[CollectorMessage] = []
        self.broken: Exception | None = None
        self.introduction: Introduction | None = None
        self.over = asyncio.Event()

    def meet(self, introduction: Introduction) -> Meeting:
        self.introduction = introduction
        if introduction.collector.role == "router":
            raise Incompatible("routers hold no KV")
        return MEETING

    async def serve(
        self,
        incoming: AsyncIterator[CollectorMessage],
        send: Callable[[GiverMessage], Awaitable[None]],
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
async def connected(giver: Scripted) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Server]]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    add_HandoverServicer_to_server(HandoverServicer(giver), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, server
    finally:
        await server.stop(None)


async def test_a_meeting_crosses_unchanged() -> None:
    giver = Scripted([])
    introduction = Introduction(
        COLLECTOR, LAYOUT, ("nixl", "loopback"), "a" * 32, "isolated", ("tcp", "self")
    )
    async with connected(giver) as (channel, _):
        assert await GrpcGiverConnection(channel).meet(introduction) == MEETING
    assert giver.introduction == introduction


async def test_a_refused_meeting_raises_what_the_giver_raised() -> None:
    router = WorkerIdentity("router", "c" * 32, "")
    async with connected(Scripted([])) as (channel, _):
        with pytest.raises(Incompatible, match="routers hold no KV"):
            await GrpcGiverConnection(channel).meet(Introduction(router, LAYOUT, (), ""))


async def test_every_message_crosses_unchanged() -> None:
    giver = Scripted(GIVER_MESSAGES, "listens")
    async with connected(giver) as (channel, _):
        stream = GrpcGiverConnection(channel).collect()
        for message in COLLECTOR_MESSAGES:
            await stream.send(message)
        told = aiter(stream)
        assert [await anext(told) for _ in GIVER_MESSAGES] == GIVER_MESSAGES
        await stream.close()
        await giver.over.wait()
    assert giver.heard == COLLECTOR_MESSAGES and giver.broken is None


async def test_failures_cross_with_their_kind_and_text() -> None:
    error = Cancelled("the client left", retry_after_s=2.0)
    giver = Scripted([Failed(error)], "listens")
    async with connected(giver) as (channel, _):
        stream = GrpcGiverConnection(channel).collect()
        await stream.send(Failed(error))
        told = await anext(aiter(stream))
        await stream.close()
        await giver.over.wait()
    for message in (told, giver.heard[0]):
        assert isinstance(message, Failed) and isinstance(message.error, Cancelled)
        assert message.error.message == "the client left"
        assert message.error.retry_after_s == 2.0


async def test_the_streams_end_ends_the_iteration() -> None:
    async with connected(Scripted([Announced(3)])) as (channel, _):
        stream = GrpcGiverConnection(channel).collect()
        assert [message async for message in stream] == [Announced(3)]
        await stream.close()
        with pytest.raises(Unavailable):
            await stream.send(Heartbeat())


async def test_the_reader_may_be_cancelled_without_ending_the_stream() -> None:
    giver = Scripted([], "listens")
    async with connected(giver) as (channel, _):
        stream = GrpcGiverConnection(channel).collect()
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait([reading])
        await stream.send(Completed())
        await stream.close()
        await giver.over.wait()
    assert giver.heard == [Completed()] and giver.broken is None


async def test_a_dead_server_is_unavailable() -> None:
    async with connected(Scripted([Announced(3)], "listens")) as (channel, server):
        stream = GrpcGiverConnection(channel).collect()
        told = aiter(stream)
        assert await anext(told) == Announced(3)
        await server.stop(None)
        with pytest.raises(Unavailable):
            await anext(told)
        with pytest.raises(Unavailable):
            await stream.send(Heartbeat())
        await stream.close()


@pytest.mark.parametrize("ending", ["listens", "talks"])
async def test_a_collector_that_vanishes_ends_the_givers_work(ending: str) -> None:
    giver = Scripted([Announced(3)], ending)
    async with connected(giver) as (channel, _):
        stream = GrpcGiverConnection(channel).collect()
        assert await anext(aiter(stream)) == Announced(3)
        await channel.close()
        async with asyncio.timeout(20):
            await giver.over.wait()
        await stream.close()


async def test_closing_is_bounded_although_the_giver_goes_on_talking() -> None:
    giver = Scripted([], "talks")
    async with connected(giver) as (channel, _):
        stream: GrpcCollectStream = GrpcGiverConnection(channel).collect()
        await anext(aiter(stream))
        async with asyncio.timeout(20):
            await stream.close()
            await giver.over.wait()


async def test_a_giver_that_leaves_while_it_is_written_to_has_left() -> None:
    """gRPC calls that an internal error, as if it were a fault of ours.

    What the reader meets depends on who was first, the giver's end or our write: both are an end.
    """
    giver = Scripted([], "ends")
    async with connected(giver) as (channel, _):
        stream = GrpcGiverConnection(channel).collect()
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable, match="the giver left"):
                while True:
                    await stream.send(Heartbeat())
            with suppress(Unavailable):
                async for _ in stream:
                    pass
        await stream.close()


async def test_an_empty_message_from_either_side_is_a_fault() -> None:
    giver = Scripted([], "listens")
    async with connected(giver) as (channel, _):
        call = HandoverStub(channel).Collect()
        await call.write(pb.CollectRequest())
        await call.done_writing()
        await giver.over.wait()
    assert isinstance(giver.broken, HandoverFailed)
