"""The gRPC ends of Meet and Collect: a broken stream is Unavailable on either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from baton.core.errors import BatonError, Internal, Unavailable
from baton.rpc.calls import abandon
from baton.rpc.errors import from_rpc_error
from baton.transfer.stream import FAREWELL_S
from baton.v1 import handover_pb2 as pb
from baton.v1 import handover_pb2_grpc

if TYPE_CHECKING:
    from baton.transfer.sender import KvSender

MAX_INBOX = 256
"""Messages of one stream that are read ahead."""


class HandoverServicer(handover_pb2_grpc.HandoverServicer):
    """Serves `baton.v1.Handover` for one sender."""

    def __init__(self, sender: KvSender) -> None:
        self._sender = sender

    async def Meet(
        self,
        request: pb.MeetRequest,
        context: grpc.aio.ServicerContext[pb.MeetRequest, pb.MeetResponse],
    ) -> pb.MeetResponse:
        return self._sender.meet(request)

    async def Collect(  # type: ignore[override]  # the stubs know handlers that yield only
        self,
        request_iterator: AsyncIterator[pb.CollectRequest],
        context: grpc.aio.ServicerContext[pb.CollectRequest, pb.CollectResponse],
    ) -> None:
        async def incoming() -> AsyncIterator[pb.CollectRequest]:
            try:
                async for request in request_iterator:
                    yield request
            except BatonError:
                raise
            except Exception:
                raise Unavailable("the receiver left") from None

        async def send(message: pb.CollectResponse) -> None:
            try:
                await context.write(message)
            except Exception:
                # gRPC has several exceptions for a stream that is no more.
                raise Unavailable("the receiver left") from None

        await self._sender.serve(incoming(), send)


class GrpcSenderConnection:
    """Reaches one sender over a borrowed channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = handover_pb2_grpc.HandoverStub(channel)

    async def meet(self, request: pb.MeetRequest) -> pb.MeetResponse:
        """Raises Incompatible, Unavailable and whatever else the sender answers."""
        try:
            return await self._stub.Meet(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def collect(self) -> GrpcCollectStream:
        """Opens a Collect stream; what goes wrong shows when it is used."""
        return GrpcCollectStream(self._stub.Collect())


class GrpcCollectStream:
    """The receiver's end of one stream, open from the start.

    Iterating gives the sender's messages and ends, or raises Unavailable, when the stream does; it
    may be abandoned and cancelled without ending the stream. A task reads ahead into a bounded
    inbox, because gRPC cancels a call whose reader is cancelled.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._inbox: asyncio.Queue[pb.CollectResponse | BatonError | None] = asyncio.Queue(
            MAX_INBOX
        )
        self._closing = False
        self._reading = asyncio.create_task(self._read())

    async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
        while (message := await self._inbox.get()) is not None:
            if isinstance(message, BatonError):
                raise message
            yield message

    async def send(self, message: pb.CollectRequest) -> None:
        """Raises Unavailable when the stream is broken."""
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise Unavailable("the sender left") from None

    async def close(self) -> None:
        """Ends our half, gives the sender a moment to end its own, then cancels. Idempotent."""
        self._closing = True
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._call.done_writing()
                await asyncio.wait([self._reading])
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            # The sender is stuck or gone.
            pass
        finally:
            await abandon(self._call)
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        last: BatonError | None = None
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                await self._put(response)
        except grpc.aio.AioRpcError as error:
            last = from_rpc_error(error)
            if isinstance(last, Internal):
                # gRPC's own word for a stream that ended while we wrote. Senders report their
                # faults in messages.
                last = Unavailable("the sender left")
        await self._put(last)

    async def _put(self, message: pb.CollectResponse | BatonError | None) -> None:
        if not self._closing:
            await self._inbox.put(message)
