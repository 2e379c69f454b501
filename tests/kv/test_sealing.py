"""Where sealing takes long, the next KV chunk is packed meanwhile, and chunks are sent in order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batonlm.core.errors import HandoverFailed, Internal
from batonlm.core.handover.leaf_hash import Points
from batonlm.core.scheduler.plan import KvPayload
from batonlm.transfer.staging import HostMemory
from batonlm.transfer.ucx import KvNetwork, Ucx
from tests.kv.rig import TOKENS, Pool, kv_of, rig

BUFFER_BYTES = 1 << 20
"""Large enough that hashing one leaves the event loop."""
PER_BUFFER = (BUFFER_BYTES - 128) // 256
POSITIONS = 3 * PER_BUFFER
PATIENCE_S = 120.0


class Watched(HostMemory):
    """Once armed, hashes the first KV chunk only when another was packed, or breaks."""

    def __init__(self) -> None:
        super().__init__(4 * BUFFER_BYTES)
        self.may_hash = threading.Event()
        self.waited: list[bool] = []
        self.armed = self.breaks = False

    def leaf_hashes(self, part: KvPayload, points: Points) -> bytes:
        if self.armed and not self.waited:
            self.waited.append(self.may_hash.wait(PATIENCE_S))
            if self.breaks:
                raise Internal("the device has failed")
        return super().leaf_hashes(part, points)


@pytest.mark.parametrize("breaks", [False, True])
async def test_chunks_are_packed_while_one_is_sealed(breaks: bool) -> None:
    memory, isolated = Watched(), Ucx(KvNetwork.ISOLATED)
    async with rig(
        sender_buffer_bytes=BUFFER_BYTES,
        receiver_buffer_bytes=BUFFER_BYTES,
        sender_memory=memory,
        sender_ucx=isolated,
        receiver_ucx=isolated,
    ) as world:
        await world.receiver.meet(world.sender.identity)
        memory.armed, memory.breaks, handover_id = True, breaks, bytes(range(16))
        packed: list[int] = []

        async def pack(first_position: int, count: int, out: KvPayload) -> None:
            positions = range(first_position, first_position + count)
            memory.write(out, b"".join(kv_of(handover_id, each) for each in positions))
            packed.append(first_position)
            if len(packed) == 2:
                memory.may_hash.set()

        offer = world.sender.offer(
            handover_id, world.collecting_as.instance_id, POSITIONS, pack, deadline_s=PATIENCE_S
        )
        world.compute(offer)
        pool = Pool()
        async with asyncio.timeout(PATIENCE_S):
            if breaks:
                with pytest.raises(HandoverFailed):
                    await world.collect(offer, pool)
                assert not pool.kv
            else:
                collected = await world.collect(offer, pool)
                assert collected.tokens == TOKENS and list(pool.kv) == list(range(POSITIONS))
                assert pool.kv[POSITIONS - 1] == kv_of(handover_id, POSITIONS - 1)
        assert memory.waited == [True]
        assert packed[:2] == [0, PER_BUFFER]
