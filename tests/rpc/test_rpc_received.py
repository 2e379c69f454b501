"""Bytes that are no message, and calls without one, are the caller's mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

WITHIN_S = 120.0
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GARBAGE = b"\xff"


async def sent(channel: grpc.aio.Channel, path: str, *messages: bytes) -> Any:
    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    method: Any = channel.stream_stream(path)
    call = method(requests(), timeout=WITHIN_S)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return call


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        (CHECK, [GARBAGE]),
        (CHECK, []),
        (WATCH, [GARBAGE]),
        (WATCH, []),
        (REFLECT, [GARBAGE]),
        (REFLECT, [reflection_pb2.ServerReflectionRequest().SerializeToString(), GARBAGE]),
    ],
)
async def test_it_is_refused(channel: grpc.aio.Channel, path: str, messages: list[bytes]) -> None:
    call = await sent(channel, path, *messages)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "message" in (await call.details() or "")
    assert "Error" not in (await call.details() or "")


async def test_a_message_that_is_one_is_answered(channel: grpc.aio.Channel) -> None:
    call = await sent(channel, CHECK, health_pb2.HealthCheckRequest().SerializeToString())
    assert await call.code() is grpc.StatusCode.OK
