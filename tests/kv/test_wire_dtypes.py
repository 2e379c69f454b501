"""KV that is kept as bfloat16 by one process arrives in another that keeps it as float32, over real
NIXL and sent as either of two types that both agree on; where they do not agree nothing moves."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from batonlm.core.errors import Incompatible
from batonlm.core.request.model import SCALED, KvLayout, WorkerIdentity
from batonlm.engine.kv.cache import DTYPES, KvCache, recoded
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import KvReceiver, TransferRequest
from batonlm.transfer.transports import Staging
from tests.kv.rig import BUFFER_BYTES, identity
from tests.kv.wire_process import (
    BLOCK_SIZE,
    CPU,
    EXTENTS,
    NUM_BLOCKS,
    NUM_BUFFERS,
    NUM_POSITIONS,
    filled,
    layout,
)

ON_THE_WIRE = ("bfloat16", *SCALED)
PATIENCE_S = 120


@pytest.mark.deep
async def test_types_may_differ_where_the_wires_are_the_same() -> None:
    me = identity("decode")
    ids = {dtype: secrets.token_bytes(16) for dtype in ON_THE_WIRE}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kv.wire_process", me.instance_id),
        *(f"{dtype}:{ids[dtype].hex()}" for dtype in ON_THE_WIRE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout
        async with asyncio.timeout(PATIENCE_S), here(me) as staging:
            for dtype, told in zip(
                ON_THE_WIRE, json.loads(await process.stdout.readline()), strict=True
            ):
                sender = WorkerIdentity("prefill", *told)
                refused = f"dtype: {dtype} against float32"
                with pytest.raises(Incompatible, match=refused):
                    await collect(me, staging, layout("float32"), sender, bytes(16))
                cache = await collect(me, staging, layout(dtype), sender, ids[dtype])
                check(cache, filled(dtype), DTYPES[dtype])
    finally:
        process.kill()
        await process.communicate()


@asynccontextmanager
async def here(me: WorkerIdentity) -> AsyncIterator[Staging]:
    staging = await Staging.open(
        me.instance_id, transport="nixl", num_buffers=NUM_BUFFERS, buffer_bytes=BUFFER_BYTES
    )
    try:
        yield staging
    finally:
        await staging.close()


async def collect(
    me: WorkerIdentity,
    staging: Staging,
    shape: KvLayout,
    sender: WorkerIdentity,
    handover_id: bytes,
) -> KvCache:
    """The memory of a worker that keeps float32, after the hand-over."""
    cache = KvCache(shape, NUM_BLOCKS, BLOCK_SIZE, CPU, dtype=torch.float32)

    async def reserve() -> int:
        return 0

    async def unpack(first_position: int, count: int, payload: memoryview) -> None:
        cache.unpack(EXTENTS, first_position, count, payload)

    ticket = TransferRequest(handover_id, sender, NUM_POSITIONS, PATIENCE_S)
    async with grpc.aio.insecure_channel(sender.address) as channel:
        receiver = KvReceiver(me, shape, staging, lambda _: SenderConnection(channel))
        try:
            await receiver.collect(ticket, reserve, unpack)
        finally:
            await receiver.close()
    return cache


def check(arrived: KvCache, sent: KvCache, wire: torch.dtype) -> None:
    """Every number is the wire's nearest, and others are untouched."""
    places = [block * BLOCK_SIZE + i for block in (1, 2, 0, 3) for i in range(BLOCK_SIZE)]
    carried, others = places[:NUM_POSITIONS], places[NUM_POSITIONS:]
    wanted = recoded(recoded((sent.keys, sent.values), wire), torch.float32)
    for now, before in zip((arrived.keys, arrived.values), wanted, strict=True):
        assert now.dtype == torch.float32
        assert torch.equal(now[:, :, carried], before[:, :, carried])
        assert not now[:, :, others].any()
