"""Hand-overs whose buffers lie in a device's memory, for which ordinary memory stands."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.errors import HandoverFailed, InvalidArgument, Unavailable
from batonlm.core.kvcache.block_pool import Extents
from batonlm.engine.kv.cache import BlockCache
from batonlm.engine.kv.staging import DeviceStaging
from batonlm.testing.faults import FaultInjector, FaultSpec, parse
from batonlm.transfer import nixl, receiver
from batonlm.transfer.kv_chunk import POLY
from batonlm.transfer.receiver import MAX_IN_FLIGHT
from batonlm.transfer.transports import Staging
from tests.engine.devices import reason_against_interpreter
from tests.kv.rig import BUFFER_BYTES, LAYOUT, POSITIONS_PER_BUFFER, Pool, expected, rig

pytestmark = [
    pytest.mark.skipif(not nixl.available(), reason="NIXL is not installed"),
    pytest.mark.skipif(bool(reason_against_interpreter()), reason=reason_against_interpreter()),
]

CPU = torch.device("cpu")
NUM_BUFFERS = 4
POSITIONS = 3 * POSITIONS_PER_BUFFER
DAMAGE = (
    "corrupt@sender.sealed:part=payload,at=2",
    pytest.param("corrupt@receiver.read:part=payload,at=2", marks=pytest.mark.deep),
    "replay@sender.sealed:part=payload,at=2",
    pytest.param("swap@transport.read:at=2", marks=pytest.mark.deep),
    "truncate@transport.read:at=2",
    pytest.param("swap@sender.told:at=2", marks=pytest.mark.deep),
)


def device_memory() -> DeviceStaging:
    return DeviceStaging(CPU, NUM_BUFFERS * BUFFER_BYTES)


@pytest.mark.parametrize(
    ("sender", "receiver"), [(True, True), (True, False), (False, True)], ids=str
)
async def test_kv_arrives_between_any_two_memories(sender: bool, receiver: bool) -> None:
    async with rig(
        "nixl",
        num_buffers=NUM_BUFFERS,
        sender_memory=device_memory() if sender else None,
        receiver_memory=device_memory() if receiver else None,
    ) as world:
        for _ in range(2):
            offer, pool = world.offer(POSITIONS), Pool()
            world.compute(offer)
            await world.collect(offer, pool)
            assert pool.kv == expected(offer.handover_id, POSITIONS)
        assert POLY in (world.given.digests[0], world.landed.digests[0])


@pytest.mark.parametrize("rule", DAMAGE)
async def test_damage_is_found_before_it_is_unpacked(rule: str) -> None:
    faults = FaultInjector(FaultSpec()), FaultInjector(FaultSpec())
    async with rig(
        "nixl",
        num_buffers=NUM_BUFFERS,
        sender_memory=device_memory(),
        receiver_memory=device_memory(),
        sender_faults=faults[0],
        receiver_faults=faults[1],
    ) as world:
        for _ in range(2):
            offer, pool = world.offer(POSITIONS), Pool()
            world.compute(offer)
            await world.collect(offer, pool)
        faults["@sender." not in rule].arm(parse(rule))
        offer, pool = world.offer(POSITIONS), Pool()
        world.compute(offer)
        with pytest.raises(HandoverFailed, match="what was announced"):
            await world.collect(offer, pool)
        assert sum(each.injected.total() for each in faults) == 1
        assert pool.kv.items() <= expected(offer.handover_id, POSITIONS).items()


async def test_no_more_is_tried_on_one_key_than_may_be_in_flight() -> None:
    """The bound of decision 043 on forgeries: every KV chunk is damaged, and few are looked at."""
    faults = FaultInjector(FaultSpec())
    async with rig("device", num_buffers=16, sender_faults=faults) as world:
        await world.receiver.meet(world.sender.identity)
        faults.arm(parse("corrupt@sender.sealed:part=payload"))
        offer, pool = world.offer(12 * POSITIONS_PER_BUFFER), Pool()
        world.compute(offer)
        with pytest.raises(HandoverFailed, match="what was announced"):
            await world.collect(offer, pool)
        assert 1 <= world.receiver.stats.mismatches["digest"] <= MAX_IN_FLIGHT
        assert not pool.kv
        with pytest.raises(InvalidArgument, match="used before"):
            world.offer(1, handover_id=offer.handover_id)


async def test_a_read_that_hangs_keeps_its_buffer_and_the_rest_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = FaultInjector(FaultSpec())
    async with rig("device", num_buffers=8, receiver_faults=faults) as world:
        await world.receiver.meet(world.sender.identity)
        faults.arm(parse("drop@transport.read:at=1,seconds=3"))
        offer, pool = world.offer(POSITIONS), Pool()
        world.compute(offer)
        with monkeypatch.context() as patch, pytest.raises(HandoverFailed, match="could not be"):
            patch.setattr(receiver, "READ_S", 1.0)
            await world.collect(offer, pool)
        assert world.landed.ring.num_orphaned == 1
        again, next_pool = world.offer(POSITIONS), Pool()
        world.compute(again)
        await world.collect(again, next_pool)
        assert next_pool.kv == expected(again.handover_id, POSITIONS)
        assert pool.kv == {}, "nothing is unpacked behind a gap"
        # The buffer comes back when the read has ended, which the rig waits for.


async def test_a_device_without_nixl_is_refused() -> None:
    with pytest.raises(Unavailable, match="loopback"):
        await Staging.open(
            "ab" * 16,
            transport="loopback",
            num_buffers=NUM_BUFFERS,
            buffer_bytes=BUFFER_BYTES,
            memory=device_memory(),
        )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_kv_is_packed_and_unpacked_in_place(stored: torch.dtype) -> None:
    """Into and out of the same bytes as in the host, converted or not."""
    memory, blocks = device_memory(), 4
    source, target = (BlockCache(LAYOUT, blocks, 16, CPU, dtype=stored) for _ in range(2))
    source.storage.normal_()
    table: Extents = ((2, 1), (0, 1))
    count, size = 5, 5 * LAYOUT.bytes_per_position
    part = memory.part(BUFFER_BYTES + 128, size)
    source.pack(table, 14, count, part)
    packed = bytearray(size)
    source.pack(table, 14, count, memoryview(packed))
    assert memory.read(part) == packed and any(packed)
    target.unpack(table, 14, count, part)
    again = bytearray(size)
    target.pack(table, 14, count, memoryview(again))
    assert again == packed
