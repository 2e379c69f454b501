"""A worker is ready only while its own way for KV works, and does not flap."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from batonlm.transfer import nixl
from batonlm.v1 import worker_pb2
from batonlm.v1.worker_pb2_grpc import WorkerStub
from tests.services.worker.pair import PATIENCE_S
from tests.services.worker.processes import becomes, metrics_of, worker

MODULE = "tests.services.worker.broken_way"
LOOPBACK = ("--transport", "loopback")
FAST = {"BATON_TEST_CONSTANTS": "batonlm.worker.process.PROBE_INTERVAL_S=0.05"}


async def test_a_way_that_breaks_makes_not_ready_until_it_works_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    environment = {"BROKEN": str(broken), **FAST}
    async with worker(MODULE, tmp_path, *LOOPBACK, environment=environment) as decode:
        await becomes(decode, True, worker_pb2.WORKER_STATE_SERVING)
        broken.touch()
        await becomes(decode, False, worker_pb2.WORKER_STATE_STARTING)
        broken.unlink()
        await becomes(decode, True, worker_pb2.WORKER_STATE_SERVING)
        read = await asyncio.to_thread(metrics_of, decode.metrics)
        assert read['baton_probes_total{outcome="failed",path="self"}'] >= 2
        assert read['baton_parcels_total{side="receiver"}'] == 0


@pytest.mark.deep
@pytest.mark.skipif(not nixl.available(), reason="no NIXL here")
async def test_a_transport_that_does_not_work_is_left_out(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    async with worker(MODULE, tmp_path, environment={"BROKEN": str(broken)}) as decode:
        watch: Any = WorkerStub(decode.channel).Watch(worker_pb2.WatchRequest())
        assert (await watch.read()).description.transports == ["nixl"]
        watch.cancel()


async def test_a_worker_whose_only_way_does_not_work_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE, "--model", str(tmp_path)),
        *("--listen", "127.0.0.1:0", "--transport", "loopback"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "BROKEN": str(broken)},
    )
    async with asyncio.timeout(PATIENCE_S):
        _, told = await process.communicate()
    assert process.returncode == 3
    assert b"the KV transport loopback does not work here" in told and b"digest" in told
