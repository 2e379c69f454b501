"""The gRPC service `baton.v1.Inference` for web pages: the Connect protocol over HTTP.

Browsers cannot speak gRPC. Clients of Connect post the same messages, in protobuf's JSON or binary
form, to the same method names, over HTTP/1.1 or HTTP/2. An answer that streams is a series of
envelopes: a byte of flags, the length in 4 bytes, big-endian, and a message; the last envelope says
in JSON how the stream ended. Written from the protocol's reference
(https://connectrpc.com/docs/protocol). Messages are not compressed.

Keys, hosts, limits of bodies and CORS are those of all HTTP routes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import MOST_LETTERS, BatonError, Internal, InvalidArgument, Unimplemented
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.request import Request
from batonlm.router.api.grpc.access import bounded_s
from batonlm.router.api.grpc.inference import (
    SERVICE,
    EventMessages,
    RequestMessage,
    VectorMessage,
    chat_from_proto,
    embed_from_proto,
    embed_response,
    generate_from_proto,
    in_client_words,
    leave,
    listed_models,
    opened,
    resumed,
    score_from_proto,
    score_response,
    vectors,
)
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.body import Bodies, content_type, while_connected
from batonlm.router.api.http.responses import (
    Failure,
    Header,
    HttpError,
    Json,
    encode,
    error_headers,
    error_status,
    send_parts,
)
from batonlm.router.api.translation import IDEMPOTENCY_KEY
from batonlm.router.request.pipeline import EventStream, Pipeline, left
from batonlm.router.workers.encoders import Vectors
from batonlm.rpc.errors import grpc_code, to_status
from batonlm.rpc.tracing import context_of
from batonlm.v1 import inference_pb2 as pb

PREFIX = f"/{SERVICE}/"
FAREWELL_S = 0.5
"""Seconds that a client has to read the end of its stream when the server closes."""

log = logging.getLogger(__name__)

_JSON, _PROTO = b"application/json", b"application/proto"
_JSON_STREAM, _PROTO_STREAM = b"application/connect+json", b"application/connect+proto"
_LAST, _COMPRESSED = 2, 1
"""Flags of an envelope."""
_ENVELOPE = struct.Struct(">BI")
_AT_ONCE_BYTES = 16 << 10
"""Larger JSON is read beside the event loop: the largest body takes more than a second."""
_MOST_DIGITS = 10
"""Of a timeout in milliseconds."""
_CODES = {413: "resource_exhausted", 415: "unimplemented", 421: "permission_denied"}
"""Of failures of the HTTP exchange itself; others are of routes, which are not implemented."""


def connect_routes(pipeline: Pipeline, bodies: Bodies) -> list[BaseRoute]:
    """Returns the routes of the service's methods."""
    apps: dict[str, ASGIApp] = {
        "Chat": _Stream(pipeline, bodies, pb.ChatRequest, _chat, pb.ChatResponse),
        "Generate": _Stream(pipeline, bodies, pb.GenerateRequest, _generate, pb.GenerateResponse),
        "Resume": _Stream(pipeline, bodies, pb.ResumeRequest, _resume, pb.ResumeResponse),
        "Leave": _Unary(pipeline, bodies, pb.LeaveRequest, _leave),
        "ListModels": _Unary(pipeline, bodies, pb.ListModelsRequest, _list_models),
        "Embed": _Unary(pipeline, bodies, pb.EmbedRequest, _embed),
        "Score": _Unary(pipeline, bodies, pb.ScoreRequest, _score),
    }
    return [Route(PREFIX + name, app, methods=["POST"]) for name, app in apps.items()]


def speaks_connect(scope: Scope) -> bool:
    """Whether a request is for the service, and so expects its errors in Connect's form."""
    return bool(scope["path"].startswith(PREFIX))


async def send_failure(scope: Scope, send: Send, error: Failure, request_id: str) -> None:
    """Answers a request that was refused before anything was sent: in an envelope where the client
    expects a stream, with a status where it does not."""
    kind = content_type(dict(scope["headers"]))
    headers = error_headers(error, request_id)
    status = error_status(error)
    # A client that is wrong about the route or the content type may be none of Connect at all.
    misdirected = isinstance(error, HttpError) and status in (404, 405, 415)
    if kind in (_JSON_STREAM, _PROTO_STREAM) and not misdirected:
        envelopes = _Envelopes(send, kind)
        await envelopes.start(headers)
        await envelopes.end(_error_document(error, request_id))
        return
    if status == 415:
        accepted = _kinds(scope["path"])
        headers.append((b"accept-post", b", ".join(accepted)))
    await send_parts(send, [encode(_error_document(error, request_id))], headers, status)


def _kinds(path: str) -> tuple[bytes, bytes]:
    streams = path.removeprefix(PREFIX) in ("Chat", "Generate", "Resume")
    return (_JSON_STREAM, _PROTO_STREAM) if streams else (_JSON, _PROTO)


def _error_document(error: Failure, request_id: str) -> Json:
    if isinstance(error, HttpError):
        return {"code": _CODES.get(error.status, "unimplemented"), "message": error.message}
    worded = in_client_words(error)
    status = to_status(worded, request_id)
    # gRPC's names have two l.
    code = grpc_code(worded).name.lower().replace("cancelled", "canceled")
    details = [
        {
            "type": detail.type_url.rpartition("/")[2],
            "value": base64.b64encode(detail.value).decode().rstrip("="),
        }
        for detail in status.details
    ]
    return {"code": code, "message": status.message, "details": details}


Asked = tuple[Pipeline, Scope, Holding]
"""What a method needs besides its message."""


@dataclass(frozen=True, slots=True)
class _Unary:
    """An ASGI app of a method that does not stream. Raises BatonError or HttpError only before
    anything is sent."""

    pipeline: Pipeline
    bodies: Bodies
    message: type[Any]
    answer: Callable[[Any, Asked], Awaitable[Message]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        kind = content_type(headers)
        async with self.bodies.received(scope, receive, (_JSON, _PROTO)) as body:
            with self.pipeline.reading(caller(scope)):
                _check_version(headers)
                message = await _message(self.message, kind, body.raw)
            body.raw = b""
            work = self._respond(message, scope, body.holding, send, kind)
            await while_connected(receive, work)

    async def _respond(
        self, message: Any, scope: Scope, holding: Holding, send: Send, kind: bytes
    ) -> None:
        answer = await self.answer(message, (self.pipeline, scope, holding))
        large = kind == _JSON and answer.ByteSize() > _AT_ONCE_BYTES
        written = (
            await asyncio.to_thread(_written, answer, kind) if large else _written(answer, kind)
        )
        await send_parts(send, [written], kind=kind)


async def _list_models(_: pb.ListModelsRequest, asked: Asked) -> Message:
    return listed_models(asked[0])


async def _embed(message: pb.EmbedRequest, asked: Asked) -> Message:
    return embed_response(await _vectors(message, embed_from_proto, asked))


async def _score(message: pb.ScoreRequest, asked: Asked) -> Message:
    return score_response(await _vectors(message, score_from_proto, asked))


async def _vectors(
    message: VectorMessage, read: Callable[[VectorMessage, float | None], Request], asked: Asked
) -> Vectors:
    pipeline, scope, holding = asked
    return await vectors(
        pipeline, message, read, lambda: _timeout_s(dict(scope["headers"])),
        tenant=caller(scope), trace=_trace(scope), holding=holding,
    )  # fmt: skip


def _trace(scope: Scope) -> TraceContext:
    return context_of([(name.decode("latin-1"), value) for name, value in scope["headers"]])


async def _chat(message: pb.ChatRequest, asked: Asked) -> tuple[Request, EventStream]:
    return await _opened(message, chat_from_proto, asked)


async def _generate(message: pb.GenerateRequest, asked: Asked) -> tuple[Request, EventStream]:
    return await _opened(message, generate_from_proto, asked)


async def _resume(message: pb.ResumeRequest, asked: Asked) -> tuple[Request, EventStream]:
    pipeline, scope, holding = asked
    return await resumed(pipeline, message, caller(scope), holding)


async def _leave(message: pb.LeaveRequest, asked: Asked) -> pb.LeaveResponse:
    pipeline, scope, _ = asked
    return await leave(pipeline, message, caller(scope))


async def _opened(
    message: RequestMessage, read: Callable[[RequestMessage, float | None], Request], asked: Asked
) -> tuple[Request, EventStream]:
    pipeline, scope, holding = asked
    headers = dict(scope["headers"])
    key: bytes | None = headers.get(IDEMPOTENCY_KEY.lower().encode())
    return await opened(
        pipeline, message, read, lambda: _timeout_s(headers),
        tenant=caller(scope), trace=_trace(scope), holding=holding,
        idempotency_key=None if key is None else key.decode("latin-1"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stream:
    """An ASGI app of a method that streams. Raises BatonError or HttpError only before anything is
    sent."""

    pipeline: Pipeline
    bodies: Bodies
    message: type[Any]
    open: Callable[[Any, Asked], Awaitable[tuple[Request, EventStream]]]
    answer: Callable[[], Any]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        headers = dict(scope["headers"])
        kind = content_type(headers)
        envelopes = _Envelopes(send, kind)
        async with self.bodies.received(scope, receive, (_JSON_STREAM, _PROTO_STREAM)) as body:
            with self.pipeline.reading(tenant):
                _check_version(headers)
                message = await _message(self.message, kind, _only(headers, body.raw))
            body.raw = b""
            work = self._respond(message, scope, body.holding, envelopes)
            try:
                await while_connected(receive, work)
            except asyncio.CancelledError:
                # The server closes; the request's resources are released.
                await envelopes.break_off(_error_document(left(), ""))
                raise

    async def _respond(
        self, message: Any, scope: Scope, holding: Holding, envelopes: _Envelopes
    ) -> None:
        request, stream = await self.open(message, (self.pipeline, scope, holding))
        error: Json | None = None
        events = EventMessages(request)
        async with aclosing(stream):
            await envelopes.start()
            try:
                async for event in stream:
                    answer = self.answer()
                    if events.put(event, answer.event):
                        await envelopes.write(answer)
            except BatonError as failure:
                error = _error_document(failure, failure.request_id)
            except Exception:
                log.exception("a stream failed")
                error = _error_document(Internal("internal error"), "")
        await envelopes.end(error)


class _Envelopes:
    """Writes one answer that streams. `send` blocks while the client reads slowly; new output is
    coalesced at the source meanwhile."""

    def __init__(self, send: Send, kind: bytes) -> None:
        self._send = send
        self._kind = kind
        self._open = False

    async def start(self, headers: Sequence[Header] = ()) -> None:
        head = [
            (b"content-type", self._kind),
            (b"cache-control", b"no-cache"),
            # nginx would buffer envelopes until its buffer is full.
            (b"x-accel-buffering", b"no"),
            *headers,
        ]
        self._open = True
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, message: Message) -> None:
        data = _written(message, self._kind)
        body = _ENVELOPE.pack(0, len(data)) + data
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, error: Json | None = None) -> None:
        data = encode({} if error is None else {"error": error})
        body = _ENVELOPE.pack(_LAST, len(data)) + data
        self._open = False
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def break_off(self, error: Json) -> None:
        """Ends a running stream with an error, if the client reads it within FAREWELL_S."""
        if not self._open:
            return
        with suppress(Exception):
            async with asyncio.timeout(FAREWELL_S):
                await self.end(error)


def _check_version(headers: Mapping[bytes, bytes]) -> None:
    version = headers.get(b"connect-protocol-version", b"1")
    if version != b"1":
        raise InvalidArgument("must be 1", field="connect-protocol-version")


def _timeout_s(headers: Mapping[bytes, bytes]) -> float | None:
    """Returns the seconds that the client gives; None without a limit. Raises InvalidArgument and
    DeadlineExceeded."""
    field = "connect-timeout-ms"
    value = headers.get(field.encode())
    if value is None:
        return None
    if not (value.isdigit() and len(value) <= _MOST_DIGITS):
        raise InvalidArgument("must be a number of milliseconds, of 10 digits at most", field=field)
    return bounded_s(int(value) / 1000)


def _only(headers: Mapping[bytes, bytes], body: bytes) -> bytes:
    """Returns the message of the only envelope. Raises InvalidArgument and Unimplemented."""
    if headers.get(b"connect-content-encoding", b"identity").lower() != b"identity":
        raise Unimplemented("messages must not be compressed", field="connect-content-encoding")
    if len(body) >= _ENVELOPE.size:
        flags, length = _ENVELOPE.unpack_from(body)
        if flags & _COMPRESSED:
            raise Unimplemented("messages must not be compressed", field="connect-content-encoding")
        if not flags and length == len(body) - _ENVELOPE.size:
            return body[_ENVELOPE.size :]
    raise InvalidArgument("the body must be one envelope with one message", field="body")


def _written(message: Message, kind: bytes) -> bytes:
    if kind in (_PROTO, _PROTO_STREAM):
        return message.SerializeToString()
    return json_format.MessageToJson(message, indent=None).encode()


async def _message(new: type[Any], kind: bytes, data: bytes) -> Any:
    """Reads a message. Raises InvalidArgument."""
    if kind in (_JSON, _JSON_STREAM):
        if len(data) > _AT_ONCE_BYTES:
            return await asyncio.to_thread(_from_json, new, data)
        return _from_json(new, data)
    try:
        return new.FromString(data)
    except DecodeError:
        raise InvalidArgument(f"the body is not a {new.DESCRIPTOR.name}", field="body") from None


def _from_json(new: type[Any], data: bytes) -> Any:
    wrong = f"the body is not a {new.DESCRIPTOR.name} in protobuf's JSON form"
    try:
        document = msgspec.json.decode(data)
        if isinstance(document, dict):
            _check_names(document, new.DESCRIPTOR)
            return json_format.ParseDict(document, new())
    except (msgspec.MsgspecError, json_format.ParseError, ValueError, TypeError, RecursionError):
        pass
    raise InvalidArgument(wrong, field="body")


def _check_names(document: object, descriptor: Descriptor, path: str = "") -> None:
    """Raises InvalidArgument for a member that is no field, which the library does not name."""
    if not isinstance(document, dict):
        return
    for name, value in document.items():
        field = descriptor.fields_by_camelcase_name.get(name) or descriptor.fields_by_name.get(name)
        if field is None:
            where = (path + name)[:MOST_LETTERS]
            raise InvalidArgument(f"{descriptor.name} has no such field", field=where)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if isinstance(value, list) else (value,):
                _check_names(each, field.message_type, f"{path}{name}.")
