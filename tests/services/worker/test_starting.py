"""A worker that loads is alive, not started, and can be stopped; one that stands by is ready."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonlm.cli.ports import free_ports
from batonlm.v1 import worker_pb2
from batonlm.v1.worker_pb2_grpc import WorkerStub
from tests.services.worker.pair import PATIENCE_S
from tests.services.worker.processes import LOOPBACK, becomes, metrics_of, worker

NAMES = ("", "startup", "baton.v1.Prefill")


@asynccontextmanager
async def loading(
    folder: Path, listen: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    health = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.services.worker.loading_prefill"),
        *("--model", str(folder), "--listen", listen, *LOOPBACK),
        *("--health-listen", health, "--metrics-listen", "127.0.0.1:0"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if listen != "127.0.0.1:0" else None,
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


async def progress(channel: grpc.aio.Channel, wanted: str) -> bool:
    """Waits until a probe that is told no is told so why."""
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        call = stub.Check(health_pb2.HealthCheckRequest(service="startup"))
        if dict(await call.trailing_metadata())["baton-progress"] == wanted:
            return True


@pytest.mark.deep
async def test_health_is_answered_while_the_model_loads(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        loading(tmp_path) as (process, health),
        grpc.aio.insecure_channel(health) as channel,
    ):
        assert await told(channel) == [True, False, False]
        assert await progress(channel, "loading weights 43 %")
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"go on\n")
        metrics = json.loads(await process.stdout.readline())["metrics"]
        assert await told(channel) == [True, True, True]
        read = await asyncio.to_thread(metrics_of, metrics)
        parts = [
            read[f'baton_startup_seconds{{part="{part}"}}']
            for part in ("import", "engine", "weights", "ring")
        ]
        assert all(part > 0 for part in parts)
        assert read["baton_ready_seconds"] == pytest.approx(sum(parts))
        assert read["baton_load_progress"] == 1


@pytest.mark.deep
async def test_it_ends_when_told_to_while_it_loads(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        loading(tmp_path) as (process, health),
        grpc.aio.insecure_channel(health) as channel,
    ):
        assert await told(channel) == [True, False, False]
        process.terminate()
        assert await process.wait() == 128 + 15


@pytest.mark.deep
async def test_a_port_in_use_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        async with asyncio.timeout(PATIENCE_S), loading(tmp_path, listen) as (process, _):
            # It was never told to go on with loading.
            assert process.stderr is not None
            assert f"error: listen: {listen} is already in use" in (
                (await process.stderr.read()).decode()
            )
            assert await process.wait() == 2


@pytest.mark.deep
async def test_one_that_stands_by_is_ready_and_says_so(tmp_path: Path) -> None:
    async with worker("batonlm.decode", tmp_path, "--standby", "true", *LOOPBACK) as standby:
        watch = WorkerStub(standby.channel).Watch(worker_pb2.WatchRequest())
        first: Any = await watch.read()
        watch.cancel()
        assert first.description.standby
        await becomes(standby, True, worker_pb2.WORKER_STATE_SERVING)
