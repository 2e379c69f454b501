"""A service of bytes whose handlers do what the tests need: answer, fail, stream and wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from batonlm.rpc.server import Service

NAME = "test.Echo"

_Context = grpc.aio.ServicerContext[bytes, bytes]


class Echo:
    """error: what every handler raises after it has answered. waits: a unary handler was asked to
    wait. ended: handlers whose finally ran."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.waits = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: list[str] = []

    async def unary(self, request: bytes, context: _Context) -> bytes:
        try:
            if request == b"wait":
                self.waits.set()
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
            return request
        except asyncio.CancelledError:
            self.cancelled.append("unary")
            raise
        finally:
            self.ended.put_nowait("unary")

    async def generate(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:
        """Yields the request once, then fails, ends, waits, or goes on for ever."""
        try:
            yield request
            if request == b"wait":
                await asyncio.Event().wait()
            while request == b"flood":
                yield bytes(1024)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled.append("generate")
            raise
        finally:
            self.ended.put_nowait("generate")

    async def write(self, request: bytes, context: _Context) -> None:
        """As generate, with the context's write."""
        try:
            await context.write(request)
            while request == b"flood":
                await context.write(bytes(1024))
            if self.error is not None:
                raise self.error
        finally:
            self.ended.put_nowait("write")

    async def talk(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                if self.error is not None:
                    raise self.error
                yield request
        finally:
            self.ended.put_nowait("talk")

    async def collect(self, requests: AsyncIterator[bytes], context: _Context) -> bytes:
        try:
            found = [request async for request in requests]
            if self.error is not None:
                raise self.error
            return b"".join(found)
        finally:
            self.ended.put_nowait("collect")

    async def abort(self, request: bytes, context: _Context) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")

    def service(self) -> Service:
        # The stubs know the handlers of the threaded server only.
        handlers: dict[str, Any] = {
            "unary": grpc.unary_unary_rpc_method_handler(_any(self.unary)),
            "generate": grpc.unary_stream_rpc_method_handler(_any(self.generate)),
            "write": grpc.unary_stream_rpc_method_handler(_any(self.write)),
            "talk": grpc.stream_stream_rpc_method_handler(_any(self.talk)),
            "collect": grpc.stream_unary_rpc_method_handler(_any(self.collect)),
            "abort": grpc.unary_unary_rpc_method_handler(_any(self.abort)),
        }
        generic = grpc.method_handlers_generic_handler(NAME, handlers)
        return Service(NAME, lambda server: server.add_generic_rpc_handlers((generic,)))


def unary(
    channel: grpc.aio.Channel, method: str = "unary"
) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary(f"/{NAME}/{method}")


def stream(
    channel: grpc.aio.Channel, method: str = "generate"
) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    return channel.unary_stream(f"/{NAME}/{method}")


def talk(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable[bytes, bytes]:
    return channel.stream_stream(f"/{NAME}/talk")


def collect(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryMultiCallable[bytes, bytes]:
    return channel.stream_unary(f"/{NAME}/collect")


async def call(channel: grpc.aio.Channel, method: str, request: bytes) -> list[bytes]:
    """All answers of any of METHODS."""

    async def requests() -> AsyncIterator[bytes]:
        yield request

    match method:
        case "generate" | "write":
            return [answer async for answer in stream(channel, method)(request)]
        case "talk":
            return [answer async for answer in talk(channel)(requests())]
        case "collect":
            return [await collect(channel)(requests())]
        case _:
            return [await unary(channel, method)(request)]


METHODS = ("unary", "generate", "write", "talk", "collect")


def _any(handler: Any) -> Any:
    return handler
