"""Prefill and decode workers as real processes, and what their metrics say."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import WorkerIdentity
from batonlm.rpc.convert import attempt_to_proto, identity_from_proto, identity_to_proto
from batonlm.v1 import prefill_pb2, worker_pb2
from batonlm.v1.prefill_pb2_grpc import PrefillStub
from batonlm.v1.worker_pb2_grpc import WorkerStub
from tests import leaks
from tests.services.worker.pair import PATIENCE_S

LOOPBACK = ("--transport", "loopback")
"""For fake workers whose KV may move without NIXL, which loads torch: two seconds of a core."""


@dataclass
class Process:
    """A worker that serves. metrics: where it tells them, as host:port."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    identity: WorkerIdentity
    metrics: str

    async def idle(self, timeout_s: float = leaks.IDLE_S) -> None:
        """Waits until it holds nothing any more, and fails when that does not happen."""
        url = f"http://{self.metrics}/metrics"
        await asyncio.to_thread(leaks.check, leaks.RunningWorker(self.process.pid, url), timeout_s)

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def worker(
    module: str,
    folder: Path,
    *flags: str,
    runner: str = "fake",
    start_s: float = PATIENCE_S,
    stderr: int | None = None,
    environment: Mapping[str, str] = {},
    within: tuple[str, ...] = (),
) -> AsyncIterator[Process]:
    """Runs until the block is left. A worker that still runs then must hold nothing. within: a
    command that becomes the one behind it."""
    command = [module]
    if runner == "fake" and module.startswith("batonlm."):
        command = ["batonlm.testing.worker", module.removeprefix("batonlm.")]
    process = await asyncio.create_subprocess_exec(
        *(*within, sys.executable, "-m", *command, "--model", str(folder)),
        *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
        *("--log-level", "error", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(start_s):
            told = json.loads(await process.stdout.readline())
        address = told["listen"]
        async with grpc.aio.insecure_channel(address) as channel:
            watch = WorkerStub(channel).Watch(worker_pb2.WatchRequest())
            first: Any = await watch.read()
            watch.cancel()
            identity = identity_from_proto(first.description.identity)
            assert identity.address == address
            running = Process(process, channel, identity, told["metrics"])
            yield running
            await running.idle()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run_on(
    prefill: Process,
    decode: Process,
    one: Attempt,
    handover_id: bytes,
    prefix_sender: WorkerIdentity | None = None,
) -> Any:
    return PrefillStub(prefill.channel).Run(
        prefill_pb2.RunRequest(
            attempt=attempt_to_proto(one),
            handover_id=handover_id,
            decode_instance_id=decode.identity.instance_id,
            prefix_sender=None if prefix_sender is None else identity_to_proto(prefix_sender),
        )
    )


def metrics_of(address: str) -> dict[str, float]:
    with urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def becomes(process: Process, serving: bool, state: Any) -> None:
    """Waits until a decode worker's health and Watch both say so."""
    wanted = health_pb2.HealthCheckResponse.SERVING
    async with asyncio.timeout(PATIENCE_S):
        watch = health_pb2_grpc.HealthStub(process.channel).Watch(
            health_pb2.HealthCheckRequest(service="baton.v1.Decode")
        )
        while ((await watch.read()).status == wanted) != serving:
            pass
        watch.cancel()
        loads: Any = WorkerStub(process.channel).Watch(worker_pb2.WatchRequest())
        while (message := await loads.read()).load.state != state:
            assert message.WhichOneof("message")
        loads.cancel()
