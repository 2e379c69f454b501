"""A call that is abandoned leaves no task behind, also when gRPC has written it off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from batonlm.rpc.calls import abandon
from batonlm.v1 import handover_pb2 as pb
from batonlm.v1.handover_pb2_grpc import (
    HandoverServicer,
    HandoverStub,
    add_HandoverServicer_to_server,
)


class EndsUnread(HandoverServicer):
    """Says more than the caller reads, and ends."""

    async def Collect(  # type: ignore[override]  # the stubs know handlers that yield only
        self, request_iterator: AsyncIterator[pb.CollectRequest], context: Any
    ) -> None:
        for _ in range(3):
            await context.write(pb.CollectResponse(heartbeat=pb.HandoverHeartbeat()))


async def write_until_refused(call: Any) -> None:
    while True:
        await call.write(pb.CollectRequest(heartbeat=pb.HandoverHeartbeat()))


async def test_a_call_that_ended_while_it_was_written_to_leaves_no_task() -> None:
    server = grpc.aio.server()
    add_HandoverServicer_to_server(EndsUnread(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            before = asyncio.all_tasks()
            for _ in range(10):
                call = HandoverStub(channel).Collect()
                async with asyncio.timeout(120):
                    with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                        await write_until_refused(call)
                await abandon(call)
                await abandon(call)
            async with asyncio.timeout(120):
                while waiting := [task for task in asyncio.all_tasks() - before if of_a_call(task)]:
                    await asyncio.wait(waiting)
    finally:
        await server.stop(None)


def of_a_call(task: asyncio.Task[Any]) -> bool:
    return "_AioCall." in getattr(task.get_coro(), "__qualname__", "")
