"""The gRPC edge of hand-overs: both ends of Meet and Collect, messages converted once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from typing import Any, Protocol

import grpc

from baton.core.errors import BatonError, HandoverFailed, Internal, Unavailable
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
from baton.rpc.calls import abandon
from baton.rpc.convert import (
    choice_tokens_from_proto,
    choice_tokens_to_proto,
    error_from_proto,
    error_to_proto,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
)
from baton.rpc.errors import from_rpc_error
from baton.v1 import handover_pb2 as pb
from baton.v1 import handover_pb2_grpc

FAREWELL_S = 1.0
MAX_INBOX = 256


class SenderService(Protocol):
    """What the servicer serves; `baton.transfer.sender.KvSender` is one."""

    def meet(self, introduction: HandshakeRequest) -> Handshake: ...

    async def serve(
        self,
        incoming: AsyncIterator[ReceiverMessage],
        send: Callable[[SenderMessage], Awaitable[None]],
    ) -> None: ...


class HandoverServicer(handover_pb2_grpc.HandoverServicer):
    """Serves `baton.v1.Handover` for one sender."""

    def __init__(self, sender: SenderService) -> None:
        self._sender = sender

    async def Meet(
        self,
        request: pb.MeetRequest,
        context: grpc.aio.ServicerContext[pb.MeetRequest, pb.MeetResponse],
    ) -> pb.MeetResponse:
        return _meeting_to_proto(
            self._sender.meet(
                HandshakeRequest(
                    identity_from_proto(request.receiver),
                    layout_from_proto(request.layout),
                    tuple(request.transports),
                    request.sender_instance_id,
                    request.kv_network,
                    tuple(request.ucx_transports),
                )
            )
        )

    async def Collect(  # type: ignore[override]  # the stubs know handlers that yield only
        self,
        request_iterator: AsyncIterator[pb.CollectRequest],
        context: grpc.aio.ServicerContext[pb.CollectRequest, pb.CollectResponse],
    ) -> None:
        async def incoming() -> AsyncIterator[ReceiverMessage]:
            try:
                async for request in request_iterator:
                    yield _receiver_message(request)
            except BatonError:
                raise
            except Exception:
                raise Unavailable("the receiver left") from None

        async def send(message: SenderMessage) -> None:
            try:
                await context.write(_sender_message_to_proto(message))
            except Exception:
                # gRPC has several exceptions for a stream that is no more.
                raise Unavailable("the receiver left") from None

        await self._sender.serve(incoming(), send)


class GrpcSenderConnection:
    """Speaks to one sender over a borrowed channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = handover_pb2_grpc.HandoverStub(channel)

    async def meet(self, introduction: HandshakeRequest) -> Handshake:
        """Raises Incompatible, Unavailable and whatever else the sender answers."""
        request = pb.MeetRequest(
            receiver=identity_to_proto(introduction.receiver),
            layout=layout_to_proto(introduction.layout),
            transports=introduction.transports,
            sender_instance_id=introduction.sender_instance_id,
            kv_network=introduction.kv_network,
            ucx_transports=introduction.ucx_transports,
        )
        try:
            return _meeting_from_proto(await self._stub.Meet(request))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def collect(self) -> GrpcCollectStream:
        return GrpcCollectStream(self._stub.Collect())


class GrpcCollectStream:
    """The receiver's end of one stream, open from the start.

    Iterating gives the sender's messages and ends, or raises Unavailable, when the stream does; it
    may be abandoned and cancelled without ending the stream. `send` raises Unavailable when the
    stream is broken.

    A task reads ahead into a bounded inbox, because gRPC cancels a call whose reader is cancelled.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._inbox: asyncio.Queue[SenderMessage | BatonError | None] = asyncio.Queue(MAX_INBOX)
        self._closing = False
        self._reading = asyncio.create_task(self._read())

    async def __aiter__(self) -> AsyncIterator[SenderMessage]:
        while (message := await self._inbox.get()) is not None:
            if isinstance(message, BatonError):
                raise message
            yield message

    async def send(self, message: ReceiverMessage) -> None:
        try:
            await self._call.write(_receiver_message_to_proto(message))
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
            # The sender is stuck or gone: there is nobody to part from in order.
            pass
        finally:
            await abandon(self._call)
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        last: BatonError | None = None
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                await self._put(_sender_message(response))
        except grpc.aio.AioRpcError as error:
            last = from_rpc_error(error)
            if isinstance(last, Internal):
                # gRPC's own word for a stream that ended while we wrote. Senders tell their faults
                # in messages.
                last = Unavailable("the sender left")
        except BatonError as error:
            last = error
        await self._put(last)

    async def _put(self, message: SenderMessage | BatonError | None) -> None:
        if not self._closing:
            await self._inbox.put(message)


def _meeting_to_proto(meeting: Handshake) -> pb.MeetResponse:
    ring = meeting.ring
    return pb.MeetResponse(
        sender=identity_to_proto(meeting.sender),
        layout=layout_to_proto(meeting.layout),
        transport=meeting.transport,
        transport_metadata=meeting.transport_metadata,
        ring=pb.StagingPoolDescription(
            base_address=ring.base_address,
            buffer_bytes=ring.buffer_bytes,
            num_buffers=ring.num_buffers,
            device_id=ring.device_id,
            memory_kind=ring.memory_kind,
        ),
        digest=meeting.digest,
        kv_network=meeting.kv_network,
        ucx_transports=meeting.ucx_transports,
    )


def _meeting_from_proto(response: pb.MeetResponse) -> Handshake:
    ring = response.ring
    return Handshake(
        sender=identity_from_proto(response.sender),
        layout=layout_from_proto(response.layout),
        transport=response.transport,
        transport_metadata=response.transport_metadata,
        ring=StagingPoolDescription(
            ring.base_address, ring.buffer_bytes, ring.num_buffers, ring.device_id, ring.memory_kind
        ),
        digest=response.digest,
        kv_network=response.kv_network,
        ucx_transports=tuple(response.ucx_transports),
    )


def _receiver_message(request: pb.CollectRequest) -> ReceiverMessage:
    match request.WhichOneof("message"):
        case "open":
            return OpenHandover(
                request.open.handover_id,
                identity_from_proto(request.open.receiver),
                request.open.sender_instance_id,
                request.open.max_kv_chunk_bytes,
                request.open.probe_positions,
                request.open.wire_version or 1,
            )
        case "granted":
            return Granted(request.granted.from_position)
        case "full":
            return Full()
        case "credit":
            return Credit(request.credit.num_kv_chunks)
        case "collected":
            return KvChunkCollected(request.collected.index)
        case "failed":
            return Failed(error_from_proto(request.failed))
        case "completed":
            return Completed()
        case "heartbeat":
            return Heartbeat()
    raise HandoverFailed("the receiver sent a message that is empty or unknown")


def _receiver_message_to_proto(message: ReceiverMessage) -> pb.CollectRequest:
    match message:
        case OpenHandover(id_, receiver, sender_instance_id, max_bytes, probe, wire_version):
            return pb.CollectRequest(
                open=pb.OpenHandover(
                    handover_id=id_,
                    receiver=identity_to_proto(receiver),
                    sender_instance_id=sender_instance_id,
                    max_kv_chunk_bytes=max_bytes,
                    probe_positions=probe,
                    wire_version=wire_version,
                )
            )
        case Granted(from_position):
            return pb.CollectRequest(granted=pb.HandoverGranted(from_position=from_position))
        case Full():
            return pb.CollectRequest(full=pb.HandoverFull())
        case Credit(num_kv_chunks):
            return pb.CollectRequest(credit=pb.HandoverCredit(num_kv_chunks=num_kv_chunks))
        case KvChunkCollected(index):
            return pb.CollectRequest(collected=pb.KvChunkCollected(index=index))
        case Failed(error):
            return pb.CollectRequest(failed=error_to_proto(error))
        case Completed():
            return pb.CollectRequest(completed=pb.HandoverCompleted())
        case Heartbeat():
            return pb.CollectRequest(heartbeat=pb.HandoverHeartbeat())


def _sender_message(response: pb.CollectResponse) -> SenderMessage:
    match response.WhichOneof("message"):
        case "announced":
            return Announced(response.announced.num_positions)
        case "finished":
            return Finished(response.finished.num_positions)
        case "kv_chunk":
            return KvChunkReady(
                _header_from_proto(response.kv_chunk.header), response.kv_chunk.buffer
            )
        case "tokens":
            return Tokens(tuple(map(choice_tokens_from_proto, response.tokens.choices)))
        case "failed":
            return Failed(error_from_proto(response.failed))
        case "heartbeat":
            return Heartbeat()
    raise HandoverFailed("the sender sent a message that is empty or unknown")


def _sender_message_to_proto(message: SenderMessage) -> pb.CollectResponse:
    match message:
        case Announced(num_positions):
            return pb.CollectResponse(announced=pb.HandoverAnnounced(num_positions=num_positions))
        case Finished(num_positions):
            return pb.CollectResponse(finished=pb.PositionsFinished(num_positions=num_positions))
        case KvChunkReady(header, buffer):
            return pb.CollectResponse(
                kv_chunk=pb.KvChunkReady(header=_header_to_proto(header), buffer=buffer)
            )
        case Tokens(choices):
            return pb.CollectResponse(
                tokens=pb.HandoverTokens(choices=map(choice_tokens_to_proto, choices))
            )
        case Failed(error):
            return pb.CollectResponse(failed=error_to_proto(error))
        case Heartbeat():
            return pb.CollectResponse(heartbeat=pb.HandoverHeartbeat())


def _header_to_proto(header: KvChunkHeader) -> pb.KvChunkHeader:
    return pb.KvChunkHeader(**{name: getattr(header, name) for name in _HEADER_FIELDS})


def _header_from_proto(message: pb.KvChunkHeader) -> KvChunkHeader:
    return KvChunkHeader(**{name: getattr(message, name) for name in _HEADER_FIELDS})


_HEADER_FIELDS = tuple(field.name for field in fields(KvChunkHeader))
