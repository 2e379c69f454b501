"""Turns what a handler raises into a google.rpc.Status, for unary and streaming calls.

A BatonError reaches the client with its details; any other exception becomes INTERNAL with a fixed
text, and its own text goes to the log under the request's id. CancelledError passes through
untouched.

Handlers that are async generators are driven here with `context.write`, so that a generator is
closed, and its `finally` has run, before the call ends, however it ends: gRPC itself would leave
that to the garbage collector when a write fails.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from baton.core.errors import BatonError, Internal, InvalidArgument
from baton.rpc.errors import DETAILS_KEY, forget_frames, grpc_code, to_status
from baton.rpc.logs import named
from baton.rpc.tracing import context_of

# What a call sent, checked to be a message at all.
#
# gRPC's server answers bytes that it cannot decode with UNKNOWN and the text of the exception, and
# a call that asks without a message never. So the decoders given to it never raise, and the one
# message of a call is read here, where there may be none.

Decoder = Callable[[bytes], Any]

_UNDECODABLE = object()


def tolerant(decoder: Decoder | None) -> Decoder | None:
    """The decoder, with a mark in place of DecodeError; `one` and `Each` look for it."""
    if decoder is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return decoder(data)
        except DecodeError:
            return _UNDECODABLE

    return decode


async def one(_: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> Any:
    """The message of a call that sends one. Raises InvalidArgument."""
    message = await context.read()
    if message is aio.EOF:
        raise InvalidArgument("the call has no message")
    return _checked(message)


async def each(messages: AsyncIterator[Any], _: aio.ServicerContext[Any, Any]) -> Each:
    """The messages of a call that sends many."""
    return Each(messages)


class Each:
    """Iterates over messages as they come. Raises InvalidArgument at one that is none."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        # gRPC's iterator complains when it is made and then never asked.
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


log = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
"""Metadata with which one Baton process tells another the request's id."""

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Any]


Check = Callable[[str, _Context], None]
"""Raises BatonError when this caller may not call "/service/Method"."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Wraps every handler of a server. checks: all are asked before each call."""

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
        # The stubs describe the handlers of gRPC's other server, the one with threads.
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        # Also calls that send one message are taken as streams, so that none is noticed.
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
    # A write that waited when the client left: gRPC reports it so, and not as a cancellation.
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
        # The status waits behind a message that nobody read, and then the client left.
        raise asyncio.CancelledError from error


def about_call(context: _Context) -> dict[str, str]:
    """The request and the trace that a call is for, as `extra` for a log line."""
    trace = context_of(context.invocation_metadata() or ())
    return named(_request_id(context), trace.trace_id)


def _request_id(context: _Context) -> str:
    """The id the caller named, if it is harmless in a log; else a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _SAFE_ID.fullmatch(value):
            return value
    return secrets.token_hex(8)
