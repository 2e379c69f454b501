"""The one table from Baton's failures to gRPC codes, HTTP statuses and OpenAI errors, and back; and
the interceptor that answers a failure by that table.

Only `BatonError.message`, `field` and `retry_after_s` leave a process. Any other exception becomes
INTERNAL with a fixed text; its own text goes to the log with the request's id. CancelledError
passes through.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from batonlm.core.errors import (
    BatonError,
    Internal,
    InvalidArgument,
    Reason,
    WorkerLost,
    from_reason,
)
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import context_of

log = logging.getLogger(__name__)

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata that carries a serialized google.rpc.Status."""

_PASSING = (Reason.OVERLOADED, Reason.UNAVAILABLE)
_DEFAULT_RETRY_S = 1.0

_MAX_TEXT = 1024
"""Characters of a message or field that go on the wire: trailers have room for about 8 KiB."""

_Code = grpc.StatusCode


class Outcome(NamedTuple):
    """How one reason appears to a client."""

    grpc: grpc.StatusCode
    http: int
    """The HTTP status."""
    openai_type: str
    openai_code: str
    """Empty where OpenAI's API has none."""


TABLE: dict[Reason, Outcome] = {
    Reason.INVALID_ARGUMENT: Outcome(_Code.INVALID_ARGUMENT, 400, "invalid_request_error", ""),
    Reason.CONTEXT_LENGTH_EXCEEDED: Outcome(
        _Code.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"
    ),
    Reason.MODEL_NOT_FOUND: Outcome(
        _Code.NOT_FOUND, 404, "invalid_request_error", "model_not_found"
    ),
    Reason.NOT_FOUND: Outcome(_Code.NOT_FOUND, 404, "not_found", "not_found"),
    Reason.UNAUTHENTICATED: Outcome(
        _Code.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"
    ),
    Reason.UNIMPLEMENTED: Outcome(
        _Code.UNIMPLEMENTED, 501, "invalid_request_error", "not_implemented"
    ),
    Reason.OVERLOADED: Outcome(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded"),
    Reason.UNAVAILABLE: Outcome(_Code.UNAVAILABLE, 503, "server_error", "unavailable"),
    Reason.HANDOVER_FAILED: Outcome(_Code.ABORTED, 503, "server_error", "handover_failed"),
    # Incompatible workers are the operator's error, not the client's: HTTP 500 instead of 400.
    Reason.INCOMPATIBLE: Outcome(_Code.FAILED_PRECONDITION, 500, "server_error", "incompatible"),
    Reason.DEADLINE_EXCEEDED: Outcome(
        _Code.DEADLINE_EXCEEDED, 504, "server_error", "deadline_exceeded"
    ),
    # 499 is what proxies log for a client that disconnected.
    Reason.CANCELLED: Outcome(_Code.CANCELLED, 499, "server_error", "cancelled"),
    # The request itself is at fault and must not be sent again.
    Reason.QUARANTINED: Outcome(
        _Code.FAILED_PRECONDITION, 422, "invalid_request_error", "quarantined"
    ),
    Reason.INTERNAL: Outcome(_Code.INTERNAL, 500, "server_error", "internal_error"),
}

# Meanings of statuses without Baton's details: gRPC itself or a proxy produced them.
_FOREIGN: dict[grpc.StatusCode, tuple[Reason, str]] = {
    # Of a call that its caller cancelled nobody reads the status: this peer dropped it, as a server
    # of gRPC does when it stops.
    _Code.CANCELLED: (Reason.UNAVAILABLE, "the peer dropped the call"),
    _Code.DEADLINE_EXCEEDED: (Reason.DEADLINE_EXCEEDED, "the peer did not answer in time"),
    _Code.UNIMPLEMENTED: (Reason.UNIMPLEMENTED, "the peer does not offer this call"),
    _Code.UNAUTHENTICATED: (Reason.UNAUTHENTICATED, "the peer does not accept these credentials"),
    _Code.PERMISSION_DENIED: (Reason.UNAUTHENTICATED, "the peer does not permit this call"),
    _Code.NOT_FOUND: (Reason.NOT_FOUND, "the peer does not know what was named"),
    _Code.INVALID_ARGUMENT: (Reason.INVALID_ARGUMENT, "the peer refused the request"),
    # gRPC sends it for a message over the size limit. A retry would fail the same way.
    _Code.RESOURCE_EXHAUSTED: (Reason.INTERNAL, "a message was larger than the peer accepts"),
}


def grpc_code(error: BatonError) -> grpc.StatusCode:
    return TABLE[error.reason].grpc


def http_status(error: BatonError) -> int:
    return TABLE[error.reason].http


def with_hint(error: BatonError) -> BatonError:
    """The same error with a retry delay: OVERLOADED and UNAVAILABLE without one get 1 s."""
    if error.retry_after_s is not None or error.reason not in _PASSING:
        return error
    return from_reason(
        error.reason, error.message, field=error.field, retry_after_s=_DEFAULT_RETRY_S
    )


def openai_error(error: BatonError) -> dict[str, Any]:
    """The JSON body of an OpenAI error, with `retryable` added: whether a retry may succeed."""
    outcome = TABLE[error.reason]
    return {
        "error": {
            "message": error.message,
            "type": outcome.openai_type,
            "param": error.field or None,
            "code": outcome.openai_code or None,
            "retryable": error.retryable,
        }
    }


def retry_after_headers(error: BatonError) -> dict[str, str]:
    """`retry-after` (whole seconds, rounded up) and `retry-after-ms`; empty without a delay."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(math.ceil(error.retry_after_s)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
    }


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an answered failure and of its causes. Their frames may form a
    reference cycle with the failure (through a task or a timeout), which would keep everything that
    the request held until the next garbage collection."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = None
        one = one.__cause__ or one.__context__


def to_status(error: BatonError, request_id: str = "") -> status_pb2.Status:
    """The error as a Status with ErrorInfo, plus BadRequest for a field and RetryInfo for a
    delay."""
    code: int = grpc_code(error).value[0]
    message = error.message[:_MAX_TEXT]
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN)
    if request_id:
        info.metadata["request_id"] = request_id
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:_MAX_TEXT], description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> BatonError | None:
    """The inverse of `to_status`; None when Baton did not make the status."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for known in (info, bad, retry):
            if detail.Is(known.DESCRIPTOR):
                detail.Unpack(known)
    if info.domain != DOMAIN:
        return None
    reason = Reason.__members__.get(info.reason, Reason.INTERNAL)
    field = bad.field_violations[0].field if bad.field_violations else ""
    after = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    return from_reason(reason, status.message, field=field, retry_after_s=after)


def from_rpc_error(error: grpc.aio.AioRpcError) -> BatonError:
    """The BatonError of a failed call. gRPC's own texts are dropped: they hold addresses."""
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            rich = from_status(status_pb2.Status.FromString(value))
        except (DecodeError, ValueError):
            rich = None
        if rich is not None:
            return rich
    if error.code() is _Code.UNAVAILABLE:
        return WorkerLost("the peer is not reachable")
    reason, message = _FOREIGN.get(error.code(), (Reason.INTERNAL, "the call failed"))
    return from_reason(reason, message)


Decoder = Callable[[bytes], Any]

_UNDECODABLE = object()


def tolerant(decoder: Decoder | None) -> Decoder | None:
    """A decoder that returns a marker in place of DecodeError, which `one` and `Each` turn into
    InvalidArgument. gRPC would answer undecodable bytes with UNKNOWN and the exception's text."""
    if decoder is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return decoder(data)
        except DecodeError:
            return _UNDECODABLE

    return decode


async def one(_: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> Any:
    """Reads the one message of a call. Raises InvalidArgument when there is none or it cannot be
    decoded. gRPC itself would never answer a unary call without a message."""
    message = await context.read()
    if message is aio.EOF:
        raise InvalidArgument("the call has no message")
    return _checked(message)


async def each(messages: AsyncIterator[Any], _: aio.ServicerContext[Any, Any]) -> Each:
    """The messages of a client-streaming call."""
    return Each(messages)


class Each:
    """Iterates over messages as they arrive. Raises InvalidArgument for one that cannot be
    decoded."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        # gRPC's iterator warns when it is created and never awaited, so it is created late.
        self._open: AsyncIterator[Any] | None = None

    def __aiter__(self) -> Each:
        return self

    async def __anext__(self) -> Any:
        if self._open is None:
            self._open = aiter(self._messages)
        return _checked(await anext(self._open))


def _checked(message: Any) -> Any:
    if message is _UNDECODABLE:
        raise InvalidArgument("the message is not one of the type that this call takes")
    return message


REQUEST_ID_KEY = "x-request-id"
"""Metadata key that carries the request's id between Baton's processes."""

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Any]


Check = Callable[[str, _Context], None]
"""Takes "/service/Method" and the context. Raises BatonError when the call is not permitted."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Wraps every handler of a server. checks: all of them run before each call."""

    def __init__(self, *checks: Check) -> None:
        self._checks = checks

    def _check(self, method: str, context: _Context) -> None:
        for check in self._checks:
            check(method, context)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        # The type stubs describe the handlers of gRPC's threaded server.
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        # Unary requests are registered as streams too, so that a missing message is detected.
        codecs = (tolerant(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.unary_unary, method, self._check, one), *codecs
            )
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.stream_unary, method, self._check, each), *codecs
            )
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(
                _stream(handler.unary_stream, method, self._check, one), *codecs
            )
        return grpc.stream_stream_rpc_method_handler(
            _stream(handler.stream_stream, method, self._check, each), *codecs
        )


def _unary(handler: _Handler, method: str, check: Check, receive: _Handler) -> _Handler:
    async def wrapped(messages: Any, context: _Context) -> Any:
        try:
            check(method, context)
            return await handler(await receive(messages, context), context)
        except Exception as error:
            await _fail(error, context, method)

    return wrapped


def _stream(handler: _Handler, method: str, check: Check, receive: _Handler) -> _Handler:
    generates = inspect.isasyncgenfunction(handler)

    async def wrapped(messages: Any, context: _Context) -> None:
        try:
            check(method, context)
            request = await receive(messages, context)
            if generates:
                await _write_all(handler(request, context), context)
            else:
                await handler(request, context)
        except Exception as error:
            await _fail(error, context, method)

    return wrapped


async def _write_all(responses: AsyncIterator[Any], context: _Context) -> None:
    async with aclosing(responses) as open_responses:  # type: ignore[type-var]
        async for response in open_responses:
            await context.write(response)


async def _fail(error: Exception, context: _Context, method: str) -> NoReturn:
    """Ends the call with the status of what its handler raised."""
    if isinstance(error, aio.AbortError):
        raise error
    # gRPC raises InternalError, not CancelledError, in a write that waits when the client leaves.
    if isinstance(error, aio.InternalError):
        raise asyncio.CancelledError from error
    if isinstance(error, BatonError):
        request_id = error.request_id
    else:
        about = about_call(context)
        request_id = about["request_id"]
        log.error("%s failed", method, exc_info=error, extra=about)
        error = Internal("internal error")
    if context.done():
        raise asyncio.CancelledError from error
    status = to_status(error, request_id)
    forget_frames(error)
    try:
        await context.abort(
            grpc_code(error),
            status.message,
            trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
        )
    except aio.InternalError:
        # The client left while the status waited behind a message that it had not read.
        raise asyncio.CancelledError from error


def about_call(context: _Context) -> dict[str, str]:
    """The ids of a call's request and trace, as `extra` for a log line."""
    trace = context_of(context.invocation_metadata() or ())
    return named(_request_id(context), trace.trace_id)


def _request_id(context: _Context) -> str:
    """The id that the caller sent, if it is safe to log; otherwise a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _SAFE_ID.fullmatch(value):
            return value
    return secrets.token_hex(8)
