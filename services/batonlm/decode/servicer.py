"""The gRPC service of decode: one Session stream per router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

import grpc

from batonlm.core.errors import BatonError, DeadlineExceeded, InvalidArgument, Unavailable
from batonlm.core.handover.table import HANDOVER_ID_BYTES
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.attempt import Attempt, AttemptKey, SequenceKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.resumption import ADOPTION_ID_BYTES
from batonlm.decode.service import DecodeService
from batonlm.decode.sessions import RouterSession, SessionStream
from batonlm.engine.thread import EngineThread
from batonlm.rpc.convert import (
    attempt_from_proto,
    identity_from_proto,
    identity_to_proto,
    logprobs_from_proto,
)
from batonlm.rpc.logs import named
from batonlm.transfer.receiver import TransferRequest
from batonlm.v1 import decode_pb2 as pb
from batonlm.v1 import decode_pb2_grpc

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
HELLO_S = 5.0

Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves `baton.v1.Decode`, and refuses sessions for another instance id."""

    def __init__(
        self, service: DecodeService, engine: EngineThread, identity: WorkerIdentity
    ) -> None:
        self._service = service
        self._engine = engine
        self._identity = identity
        self._frames = 0

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        session, stream, welcome = await self._open(request_iterator)
        reader = asyncio.create_task(self._read(session, stream, request_iterator))
        reader.add_done_callback(lambda _: session.wake())
        try:
            yield welcome
            while not reader.done() and session.stream is stream:
                frame = await session.next_frame(stream, HEARTBEAT_S)
                if session.stream is not stream:
                    break
                if frame is None:
                    yield self._heartbeat()
                else:
                    self._frames += 1
                    frame.step = self._frames
                    yield pb.SessionResponse(frame=frame)
            if reader.done():
                reader.result()
        finally:
            session.detach(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _open(
        self, requests: AsyncIterator[pb.SessionRequest]
    ) -> tuple[RouterSession, SessionStream, pb.SessionResponse]:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded("the router did not say hello") from None
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidArgument("the first message must be a hello", field="message")
        hello = first.hello
        if hello.decode_instance_id not in ("", self._identity.instance_id):
            raise Unavailable("this address now belongs to a newer decode worker")
        if not hello.router.instance_id:
            raise InvalidArgument("must not be empty", field="hello.router.instance_id")
        session = self._service.session(hello.router.instance_id)
        lost = self._service.resume(session, _positions(hello.resume))
        welcome = pb.SessionWelcome(
            decode=identity_to_proto(self._identity),
            lost=[
                pb.SequencePosition(
                    request_id=key.request_id, choice=key.choice, attempt=key.attempt
                )
                for key in lost
            ],
        )
        return session, session.attach(), pb.SessionResponse(welcome=welcome)

    async def _read(
        self,
        session: RouterSession,
        stream: SessionStream,
        requests: AsyncIterator[pb.SessionRequest],
    ) -> None:
        """Applies messages until the stream ends. Raises InvalidArgument for a violation of the
        protocol; an error in one attempt ends only that attempt.
        """
        async for request in requests:
            if session.stream is not stream:
                return
            match request.WhichOneof("message"):
                case "start":
                    self.start_sequence(session, request.start)
                case "cancel":
                    key = AttemptKey(request.cancel.request_id, request.cancel.attempt)
                    self._service.cancel(session, key, request.cancel.choices)
                case "confirm":
                    positions = _positions(request.confirm.sequences)
                    self._service.confirm(session, positions)
                case "hand_over":
                    self._hand_over(session, request.hand_over)
                case "want":
                    self._service.want(frozenset(request.want.adoption_ids))
                case "hello":
                    raise InvalidArgument("only the first message is a hello", field="message")
                case _:
                    # A newer router may send messages that this version does not know.
                    log.debug("a message of an unknown kind on a session")

    def start_sequence(self, session: RouterSession, start: pb.StartSequence) -> None:
        try:
            attempt = attempt_from_proto(start.attempt)
            source = _source(start, attempt)
            prefix_sender = None
            if start.HasField("prefix_sender"):
                prefix_sender = identity_from_proto(start.prefix_sender)
            adoption_ids = _adoption_ids(start, attempt)
        except BatonError as error:
            key = AttemptKey(start.attempt.request_id, start.attempt.attempt)
            session.failed(key, start.attempt.choices, error)
        else:
            self._service.start(
                session,
                attempt,
                source,
                start.max_unconfirmed,
                start.held_handover_id,
                prefix_sender,
                adoption_ids,
                logprobs_from_proto(start.logprobs),
                adopts=start.adopts,
            )

    def _hand_over(self, session: RouterSession, wish: pb.HandOverSequence) -> None:
        key = SequenceKey(wish.request_id, wish.choice, wish.attempt)
        self._service.hand_over(session, key, wish.handover_id, wish.receiver_instance_id)

    def _heartbeat(self) -> pb.SessionResponse:
        return pb.SessionResponse(
            heartbeat=pb.Heartbeat(
                step_age_us=round(self._engine.step_age_s * 1e6),
                step_predicted_us=round(self._engine.step_predicted_s * 1e6),
            )
        )


def _source(start: pb.StartSequence, attempt: Attempt) -> TransferRequest | None:
    if not start.HasField("source"):
        return None
    if len(start.source.handover_id) != HANDOVER_ID_BYTES:
        raise InvalidArgument("must be 16 bytes", field="source.handover_id")
    return TransferRequest(
        handover_id=start.source.handover_id,
        sender=identity_from_proto(start.source.sender),
        num_positions=len(attempt.token_ids),
        about=named(attempt.request_id, TraceContext(attempt.traceparent).trace_id),
    )


def _adoption_ids(start: pb.StartSequence, attempt: Attempt) -> tuple[bytes, ...]:
    ids = tuple(start.adoption_ids)
    if any(len(each) != ADOPTION_ID_BYTES for each in ids):
        raise InvalidArgument(f"must be {ADOPTION_ID_BYTES} bytes each", field="adoption_ids")
    if len(ids) != len(attempt.choices) if ids else start.adopts:
        raise InvalidArgument("must be one of each choice", field="adoption_ids")
    return ids


def _positions(entries: Iterable[pb.SequencePosition]) -> dict[SequenceKey, int]:
    return {SequenceKey(e.request_id, e.choice, e.attempt): e.position for e in entries}
