"""The gRPC edge of hand-overs: both ends of Meet and Collect, messages converted once.

Knows no transport of KV and no state: `kv` does, through the ports that these classes fill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from typing import Any, Protocol

import grpc

from baton.core.errors import BatonError, HandoverFailed, Internal, Unavailable
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


class GiverService(Protocol):
    """What the servicer serves; `baton.kv.giver.Giver` is one."""

    def meet(self, introduction: Introduction) -> Meeting: ...

    async def serve(
        self,
        incoming: AsyncIterator[CollectorMessage],
        send: Callable[[GiverMessage], Awaitable[None]],
    ) -> None: ...


class HandoverServicer(handover_pb2_grpc.HandoverServicer):
    """Serves `baton.v1.Handover` for one giver."""

    def __init__(self, giver: GiverService) -> None:
        self._giver = giver

    async def Meet(
        self,
        request: pb.MeetRequest,
        context: grpc.aio.ServicerContext[pb.MeetRequest, pb.MeetResponse],
    ) -> pb.MeetResponse:
        return _meeting_to_proto(
            self._giver.meet(
                Introduction(
                    identity_from_proto(request.collector),
                    layout_from_proto(request.layout),
                    tuple(request.transports),
                    request.giver_incarnation,
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
        async def incoming() -> AsyncIterator[CollectorMessage]:
            try:
                async for request in request_iterator:
                    yield _collector_message(request)
            except BatonError:
                raise
            except Exception:
                raise Unavailable("the collector left") from None

        async def send(message: GiverMessage) -> None:
            try:
                await context.write(_giver_message_to_proto(message))
            except Exception:
                # gRPC has several exceptions for a stream that is no more.
                raise Unavailable("the collector left") from None

        await self._giver.serve(incoming(), send)


class GrpcGiverConnection:
    """Speaks to one giver over a borrowed channel, as `baton.kv.connection.GiverConnection`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = handover_pb2_grpc.HandoverStub(channel)

    async def meet(self, introduction: Introduction) -> Meeting:
        """Raises Incompatible, Unavailable and whatever else the giver answers."""
        request = pb.MeetRequest(
            collector=identity_to_proto(introduction.collector),
            layout=layout_to_proto(introduction.layout),
            transports=introduction.transports,
            giver_incarnation=introduction.giver_incarnation,
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
    """The collector's end of one stream; the port is `baton.kv.connection.CollectStream`.

    A task reads ahead into a bounded inbox, because gRPC cancels a call whose reader is cancelled.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._inbox: asyncio.Queue[GiverMessage | BatonError | None] = asyncio.Queue(MAX_INBOX)
        self._closing = False
        self._reading = asyncio.create_task(self._read())

    async def __aiter__(self) -> AsyncIterator[GiverMessage]:
        while (message := await self._inbox.get()) is not None:
            if isinstance(message, BatonError):
                raise message
            yield message

    async def send(self, message: CollectorMessage) -> None:
        try:
            await self._call.write(_collector_message_to_proto(message))
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise Unavailable("the giver left") from None

    async def close(self) -> None:
        """Ends our half, gives the giver a moment to end its own, then cancels. Idempotent."""
        self._closing = True
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._call.done_writing()
                await asyncio.wait([self._reading])
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            # The giver is stuck or gone: there is nobody to part from in order.
            pass
        finally:
            await abandon(self._call)
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        last: BatonError | None = None
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                await self._put(_giver_message(response))
        except grpc.aio.AioRpcError as error:
            last = from_rpc_error(error)
            if isinstance(last, Internal):
                # gRPC's own word for a stream that ended while we wrote. Givers tell their faults
                # in messages.
                last = Unavailable("the giver left")
        except BatonError as error:
            last = error
        await self._put(last)

    async def _put(self, message: GiverMessage | BatonError | None) -> None:
        if not self._closing:
            await self._inbox.put(message)


def _meeting_to_proto(meeting: Meeting) -> pb.MeetResponse:
    ring = meeting.ring
    return pb.MeetResponse(
        giver=identity_to_proto(meeting.giver),
        layout=layout_to_proto(meeting.layout),
        transport=meeting.transport,
        transport_metadata=meeting.transport_metadata,
        ring=pb.SlotRingDescription(
            base_address=ring.base_address,
            slot_bytes=ring.slot_bytes,
            num_slots=ring.num_slots,
            device_id=ring.device_id,
            memory_kind=ring.memory_kind,
        ),
        digest=meeting.digest,
        kv_network=meeting.kv_network,
        ucx_transports=meeting.ucx_transports,
    )


def _meeting_from_proto(response: pb.MeetResponse) -> Meeting:
    ring = response.ring
    return Meeting(
        giver=identity_from_proto(response.giver),
        layout=layout_from_proto(response.layout),
        transport=response.transport,
        transport_metadata=response.transport_metadata,
        ring=RingDescription(
            ring.base_address, ring.slot_bytes, ring.num_slots, ring.device_id, ring.memory_kind
        ),
        digest=response.digest,
        kv_network=response.kv_network,
        ucx_transports=tuple(response.ucx_transports),
    )


def _collector_message(request: pb.CollectRequest) -> CollectorMessage:
    match request.WhichOneof("message"):
        case "open":
            return OpenHandover(
                request.open.handover_id,
                identity_from_proto(request.open.collector),
                request.open.giver_incarnation,
                request.open.max_parcel_bytes,
                request.open.probe_positions,
                request.open.wire_version or 1,
            )
        case "granted":
            return Granted(request.granted.from_position)
        case "full":
            return Full()
        case "credit":
            return Credit(request.credit.num_parcels)
        case "collected":
            return ParcelCollected(request.collected.index)
        case "failed":
            return Failed(error_from_proto(request.failed))
        case "completed":
            return Completed()
        case "heartbeat":
            return Heartbeat()
    raise HandoverFailed("the collector sent a message that is empty or unknown")


def _collector_message_to_proto(message: CollectorMessage) -> pb.CollectRequest:
    match message:
        case OpenHandover(id_, collector, giver_incarnation, max_bytes, probe, wire_version):
            return pb.CollectRequest(
                open=pb.OpenHandover(
                    handover_id=id_,
                    collector=identity_to_proto(collector),
                    giver_incarnation=giver_incarnation,
                    max_parcel_bytes=max_bytes,
                    probe_positions=probe,
                    wire_version=wire_version,
                )
            )
        case Granted(from_position):
            return pb.CollectRequest(granted=pb.HandoverGranted(from_position=from_position))
        case Full():
            return pb.CollectRequest(full=pb.HandoverFull())
        case Credit(num_parcels):
            return pb.CollectRequest(credit=pb.HandoverCredit(num_parcels=num_parcels))
        case ParcelCollected(index):
            return pb.CollectRequest(collected=pb.ParcelCollected(index=index))
        case Failed(error):
            return pb.CollectRequest(failed=error_to_proto(error))
        case Completed():
            return pb.CollectRequest(completed=pb.HandoverCompleted())
        case Heartbeat():
            return pb.CollectRequest(heartbeat=pb.HandoverHeartbeat())


def _giver_message(response: pb.CollectResponse) -> GiverMessage:
    match response.WhichOneof("message"):
        case "announced":
            return Announced(response.announced.num_positions)
        case "finished":
            return Finished(response.finished.num_positions)
        case "parcel":
            return ParcelReady(_header_from_proto(response.parcel.header), response.parcel.slot)
        case "tokens":
            return Tokens(tuple(map(choice_tokens_from_proto, response.tokens.choices)))
        case "failed":
            return Failed(error_from_proto(response.failed))
        case "heartbeat":
            return Heartbeat()
    raise HandoverFailed("the giver sent a message that is empty or unknown")


def _giver_message_to_proto(message: GiverMessage) -> pb.CollectResponse:
    match message:
        case Announced(num_positions):
            return pb.CollectResponse(announced=pb.HandoverAnnounced(num_positions=num_positions))
        case Finished(num_positions):
            return pb.CollectResponse(finished=pb.PositionsFinished(num_positions=num_positions))
        case ParcelReady(header, slot):
            return pb.CollectResponse(
                parcel=pb.ParcelReady(header=_header_to_proto(header), slot=slot)
            )
        case Tokens(choices):
            return pb.CollectResponse(
                tokens=pb.HandoverTokens(choices=map(choice_tokens_to_proto, choices))
            )
        case Failed(error):
            return pb.CollectResponse(failed=error_to_proto(error))
        case Heartbeat():
            return pb.CollectResponse(heartbeat=pb.HandoverHeartbeat())


def _header_to_proto(header: ParcelHeader) -> pb.ParcelHeader:
    return pb.ParcelHeader(**{name: getattr(header, name) for name in _HEADER_FIELDS})


def _header_from_proto(message: pb.ParcelHeader) -> ParcelHeader:
    return ParcelHeader(**{name: getattr(message, name) for name in _HEADER_FIELDS})


_HEADER_FIELDS = tuple(field.name for field in fields(ParcelHeader))
