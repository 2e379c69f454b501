"""Where a worker's staging memory lies, and what follows when KV does not move from there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.kvcache.block_pool import BlockPool, Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import KvPayload, StagingMemory
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.kv.staging import DeviceStaging
from batonlm.engine.thread import EngineThread
from batonlm.testing.fake_runner import FakeRunner
from batonlm.transfer import nixl
from batonlm.transfer.staging import NO_FAULTS
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, gpudirect
from batonlm.worker.options import WorkerOptions
from batonlm.worker.staging import open_staging, pool_shape
from tests.engine.devices import reason_against_interpreter
from tests.kv.rig import identity

MIB = 1 << 20
LAYOUT = KvLayout("ab" * 32, "float32", 2, 2, 8, 8)
LOCAL = choose(KvNetwork.LOCAL)

needs_nixl = pytest.mark.skipif(
    not nixl.available() or bool(reason_against_interpreter()),
    reason="NIXL or Triton's interpreter is missing",
)


class OnDevice(FakeRunner):
    """Keeps KV in what stands for a device's memory."""

    broken = False

    @property
    def on_device(self) -> bool:
        return True

    def staging_memory(self, num_buffers: int, buffer_bytes: int) -> StagingMemory | None:
        return DeviceStaging(torch.device("cpu"), num_buffers * buffer_bytes)

    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        super().pack(extents, first_position, count, _in_host(out))
        if self.broken and isinstance(out, torch.Tensor):
            out[0] += 1

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        super().unpack(extents, first_position, count, _in_host(payload))


def _in_host(payload: KvPayload) -> KvPayload:
    tensor: Any = payload
    return memoryview(tensor.numpy()) if isinstance(payload, torch.Tensor) else payload


@asynccontextmanager
async def opened(
    runner: FakeRunner, kv_staging: str = "auto", ucx: Ucx = LOCAL
) -> AsyncIterator[Staging]:
    policy = SchedulerPolicy(max_sequences=4, token_budget=64, prefill_budget=32)
    engine = EngineThread(
        lambda: EngineLoop(runner, Scheduler(BlockPool(16, 16), policy, runner.model)),
        lambda events: None,
    )
    await engine.start()
    options = WorkerOptions(model="m", kv_staging=kv_staging, staging_mib=64)
    try:
        async with AsyncExitStack() as ends:
            staging, _ = await open_staging(
                options, ucx, engine, runner, identity("prefill"), HandoverStats(), ends,
                probe_interval_s=10.0, faults=NO_FAULTS,
            )  # fmt: skip
            yield staging
    finally:
        await engine.stop()


@needs_nixl
async def test_buffers_lie_in_the_device_when_kv_is_kept_there() -> None:
    async with opened(OnDevice(16, 16)) as staging:
        assert not staging.ring.memory.in_host and staging.names == ("nixl",)
        assert staging.ring.buffer_bytes == 32 * MIB


@needs_nixl
@pytest.mark.parametrize(
    ("kv_staging", "ucx"), [("host", LOCAL), ("auto", choose(KvNetwork.TRUSTED))], ids=str
)
async def test_buffers_lie_in_the_host_when_chosen_or_out_of_reach(
    kv_staging: str, ucx: Ucx
) -> None:
    async with opened(OnDevice(16, 16), kv_staging, replace(ucx, transports=("sm",))) as staging:
        assert staging.ring.memory.in_host


@needs_nixl
async def test_a_device_that_fails_its_test_is_given_up_unless_it_was_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = OnDevice(16, 16)
    runner.broken = True
    with caplog.at_level(logging.WARNING):
        async with opened(runner) as staging:
            assert staging.ring.memory.in_host
    assert "passes the host's memory" in caplog.text
    with pytest.raises(Unavailable, match="kv_staging is device"):
        async with opened(runner, "device"):
            pytest.fail("it opened")


async def test_memory_that_is_named_must_be_there() -> None:
    with pytest.raises(Unavailable, match="kv_staging is device"):
        async with opened(FakeRunner(16, 16), "device"):
            pytest.fail("it opened")


def test_buffers_are_as_large_as_their_memory_and_16_positions_need() -> None:
    assert pool_shape(LAYOUT, on_device=False, staging_mib=0) == (16, 4 * MIB)
    assert pool_shape(LAYOUT, on_device=True, staging_mib=0) == (16, 32 * MIB)
    assert pool_shape(LAYOUT, on_device=False, staging_mib=10) == (2, 4 * MIB)
    large = replace(LAYOUT, num_layers=61, num_kv_heads=128, key_size=192, value_size=128)
    _, size = pool_shape(large, on_device=True, staging_mib=0)
    assert size % 4096 == 0 and 0 <= size - 128 - 16 * large.bytes_per_position < 4096
    with pytest.raises(InvalidArgument, match="64 MiB or more") as refused:
        pool_shape(LAYOUT, on_device=True, staging_mib=63)
    assert refused.value.field == "staging_mib"


def test_gpudirect_takes_a_card_and_a_kernel_that_shares_memory(tmp_path: Path) -> None:
    trusted = choose(KvNetwork.TRUSTED)
    assert gpudirect(LOCAL, tmp_path) and not gpudirect(trusted, tmp_path)
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64 570.1\n")
    assert not gpudirect(trusted, tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert gpudirect(trusted, tmp_path)
    version.unlink()
    assert not gpudirect(trusted, tmp_path)
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert gpudirect(trusted, tmp_path)
