"""A stream whose worker is gone ends when it is told to, however far its next call has come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from batonlm.core.errors import BatonError
from batonlm.router.workers.shared_stream import Broadcast, SharedStream

METHOD = "/test.Worker/Session"
STEPS = 60
"""Of the event loop, from a call's beginning until it was refused; more than it takes."""

TIMES = 5
"""Over: what a step meets is not the same each time."""

ENDS_S = 120.0


class Refused(SharedStream[bytes, bytes]):
    """To one who ends every call at once."""

    resumable = True

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(Broadcast(), time.monotonic)
        self._method: Any = channel.stream_stream(METHOD)
        self.called = asyncio.Event()
        self.lost = False

    def connect(self) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        self.called.set()
        call: grpc.aio.StreamStreamCall[bytes, bytes] = self._method()
        return call

    def greeting(self) -> Sequence[bytes]:
        return ()

    def outgoing(self) -> Sequence[bytes]:
        return ()

    def incoming(self, message: bytes) -> None:
        raise AssertionError("nothing is said")

    def lose(self, error: BatonError) -> None:
        self.lost = True


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async def refuse(requests: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "another one lives here")

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Worker", {"Session": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            await opened.channel_ready()
            yield opened
    finally:
        await server.stop(0)


async def test_it_ends_whenever_it_is_told_to(channel: grpc.aio.Channel) -> None:
    for steps in TIMES * list(range(STEPS)):
        stream = Refused(channel)
        running = asyncio.create_task(stream.run())
        await stream.called.wait()
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=ENDS_S)
        assert done and running.cancelled(), f"it goes on, told to end after {steps} steps"
        assert stream.lost
