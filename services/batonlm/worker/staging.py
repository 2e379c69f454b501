"""Chooses and opens a worker's staging memory, and proves that KV moves through it."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.scheduler.plan import ModelRunner, StagingMemory
from batonlm.engine.config import MIB
from batonlm.engine.thread import EngineThread
from batonlm.transfer.kv_chunk import HEADER_BYTES
from batonlm.transfer.staging import ALIGNMENT, Faults, HostMemory
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import Ucx, gpudirect
from batonlm.worker.options import WorkerOptions
from batonlm.worker.self_test import KvSelfTest

log = logging.getLogger(__name__)

NUM_BUFFERS = 16
BUFFER_BYTES = 4 * MIB
"""Where KV is kept in the host: large enough that a KV chunk's messages cost less than its copies,
and small enough that a prompt's KV is several chunks, which are copied and read at once."""
DEVICE_BUFFER_BYTES = 32 * MIB
"""Where a device keeps KV: it copies ten times as fast, so that chunks may be as much larger."""
SMALLEST_CHUNK = 16
"""Positions that a buffer holds at least, whatever a position's size."""


def pool_shape(layout: KvLayout, *, on_device: bool, staging_mib: int) -> tuple[int, int]:
    """How many buffers of how many bytes. staging_mib: of the option; 0: NUM_BUFFERS.

    Raises InvalidArgument when so much memory has no room for two buffers.
    """
    wanted = DEVICE_BUFFER_BYTES if on_device else BUFFER_BYTES
    least = HEADER_BYTES + SMALLEST_CHUNK * layout.bytes_per_position
    size = -(-max(wanted, least) // ALIGNMENT) * ALIGNMENT
    count = staging_mib * MIB // size if staging_mib else NUM_BUFFERS
    if count < 2:
        raise InvalidArgument(
            f"must have room for two buffers of {size} bytes: {-(-2 * size // MIB)} MiB or more",
            field="staging_mib",
        )
    return count, size


async def open_staging(
    options: WorkerOptions,
    ucx: Ucx,
    engine: EngineThread,
    runner: ModelRunner,
    identity: WorkerIdentity,
    stats: HandoverStats,
    ends: AsyncExitStack,
    *,
    probe_interval_s: float,
    faults: Faults,
) -> tuple[Staging, KvSelfTest]:
    """Opens the pool in the device's memory, unless that is the host's, cannot be reached from
    where KV goes, or fails its test; else in the host's. `ends` closes it.

    Raises Unavailable when KV moves through neither, or not through the memory that the option
    kv_staging names, and InvalidArgument when staging_mib is too small.
    """
    shape = pool_shape(runner.layout, on_device=runner.on_device, staging_mib=options.staging_mib)

    async def opened(memory: StagingMemory | None) -> tuple[Staging, KvSelfTest]:
        async with AsyncExitStack() as parts:
            staging = await Staging.open(
                identity.instance_id,
                transport=options.transport,
                num_buffers=shape[0],
                buffer_bytes=shape[1],
                memory=memory,
                ucx=ucx,
                faults=faults,
            )
            parts.push_async_callback(staging.close)
            host = staging.ring.memory
            if isinstance(host, HostMemory):
                parts.callback(runner.share(host.fd, host.address, host.num_bytes))
            test = KvSelfTest(engine, runner, staging, identity, stats, probe_interval_s)
            await test.prove()
            await ends.enter_async_context(parts.pop_all())
        return staging, test

    if _wants_device(options, ucx, runner):
        try:
            memory = await engine.call(lambda loop: loop.runner.staging_memory(*shape))
            if memory is not None:
                return await opened(memory)
            reason = "the device has none for this model's KV"
        except Unavailable as error:
            reason = error.message
        if options.kv_staging == "device":
            raise Unavailable(f"kv_staging is device, and that does not work here: {reason}")
        log.warning("KV passes the host's memory, because the device's does not work: %s", reason)
    return await opened(None)


def _wants_device(options: WorkerOptions, ucx: Ucx, runner: ModelRunner) -> bool:
    if options.kv_staging == "auto":
        return runner.on_device and options.transport != "loopback" and gpudirect(ucx)
    return options.kv_staging == "device"
