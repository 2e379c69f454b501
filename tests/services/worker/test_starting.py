"""A worker that loads is alive, not started, and can be stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.ports import free_ports
from tests.services.worker.pair import PATIENCE_S

NAMES = ("", "startup", "baton.v1.Prefill")


@asynccontextmanager
async def loading(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    health = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.services.worker.loading_prefill"),
        *("--model", str(folder), "--runner", "fake", "--health-listen", health),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process, health
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def told(channel: grpc.aio.Channel) -> list[bool]:
    stub = health_pb2_grpc.HealthStub(channel)
    answers = [
        await stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True)
        for name in NAMES
    ]
    return [answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers]


async def test_health_is_answered_while_the_model_loads(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        loading(tmp_path) as (process, health),
        grpc.aio.insecure_channel(health) as channel,
    ):
        assert await told(channel) == [True, False, False]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"go on\n")
        await process.stdout.readline()
        assert await told(channel) == [True, True, True]


async def test_it_ends_when_told_to_while_it_loads(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        loading(tmp_path) as (process, health),
        grpc.aio.insecure_channel(health) as channel,
    ):
        assert await told(channel) == [True, False, False]
        process.terminate()
        assert await process.wait() == 128 + 15
