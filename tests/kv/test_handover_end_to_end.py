"""Whole hand-overs over real gRPC and both transports, when all goes well."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from batonlm.core.errors import Overloaded
from batonlm.transfer.stream import Liveness
from batonlm.transfer.ucx import KvNetwork, Ucx
from tests.kv.rig import (
    BUFFER_BYTES,
    LAYOUT,
    POSITIONS_PER_BUFFER,
    TOKENS,
    Pool,
    expected,
    rig,
    until,
)

TRANSPORTS = ("loopback", "nixl")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_positions", [1, POSITIONS_PER_BUFFER, POSITIONS_PER_BUFFER + 1, 400])
async def test_kv_and_token_arrive(transport: str, num_positions: int) -> None:
    """400 positions are more than the whole ring holds."""
    async with rig(transport) as world:
        offer, pool = world.offer(num_positions), Pool()
        world.compute(offer)
        collected = await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, num_positions)
        assert collected.tokens == TOKENS
        assert collected.cached_positions == 0
        assert collected.received_bytes == num_positions * LAYOUT.bytes_per_position
        assert (await offer.wait()).label == "completed"
        assert offer.granted is True
        assert world.receiver.stats.outcomes == world.sender.stats.outcomes == {"completed": 1}
        assert world.receiver.stats.link.bytes_per_s > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("cached", [1, 17, 39, 40])
async def test_cached_positions_do_not_travel(transport: str, cached: int) -> None:
    async with rig(transport) as world:
        offer, pool = world.offer(40), Pool(cached)
        world.compute(offer)
        collected = await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 40, start=cached)
        assert collected.cached_positions == cached
        assert collected.received_bytes == (40 - cached) * LAYOUT.bytes_per_position


async def test_kv_chunks_are_unpacked_in_order_whatever_order_reads_end_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(num_buffers=8) as world:
        offer, pool = world.offer(4 * POSITIONS_PER_BUFFER), Pool()
        (reader,) = world.landed.readers.values()
        read, order, unpacked = reader.read, [], []
        all_begun = asyncio.Event()

        async def backwards(*arguments: object) -> None:
            """The last one that was asked for ends first."""
            order.append(ended := asyncio.Event())
            if len(order) == 4:
                all_begun.set()
            await read(*arguments)  # type: ignore[arg-type]
            await all_begun.wait()
            if ended is not order[-1]:
                await order[order.index(ended) + 1].wait()
            ended.set()

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            unpacked.append(first_position)
            await pool.unpack(first_position, count, payload)

        await world.receiver.meet(world.sender.identity)
        monkeypatch.setattr(reader, "read", backwards)
        world.compute(offer)
        await world.receiver.collect(world.ticket(offer), pool.reserve, unpack)
        assert unpacked == [i * POSITIONS_PER_BUFFER for i in range(4)]
        assert pool.kv == expected(offer.handover_id, offer.num_positions)


async def test_chunks_travel_while_the_next_one_computes() -> None:
    async with rig() as world:
        offer, pool = world.offer(60), Pool()
        collecting = asyncio.create_task(world.collect(offer, pool))
        offer.announce()
        for finished in (7, 30, 31, 60):
            offer.advance(finished)
            await until(lambda finished=finished: len(pool.kv) == finished)  # type: ignore[misc]
        assert not collecting.done()
        offer.tokens(TOKENS)
        assert (await collecting).tokens == TOKENS


@pytest.mark.parametrize("first", ["offer", "collect"])
async def test_either_side_may_come_first(first: str) -> None:
    async with rig() as world:
        handover_id = secrets.token_bytes(16)
        pool = Pool()
        if first == "offer":
            offer = world.offer(20, handover_id=handover_id)
            collecting = asyncio.create_task(world.collect(offer, pool))
        else:
            ticket = world.ticket_for(handover_id, 20)
            collecting = asyncio.create_task(
                world.receiver.collect(ticket, pool.reserve, pool.unpack)
            )
            await until(lambda: world.sender.num_early_streams == 1)
            offer = world.offer(20, handover_id=handover_id)
        world.compute(offer)
        await collecting
        assert pool.kv == expected(handover_id, 20)


async def test_full_refuses_before_anything_moves() -> None:
    async with rig() as world:
        offer, pool = world.offer(20), Pool(cached=None)
        world.compute(offer)
        with pytest.raises(Overloaded):
            await world.collect(offer, pool)
        outcome = await offer.wait()
        assert outcome.label == "full" and offer.granted is False
        assert isinstance(outcome.error, Overloaded)
        assert not pool.kv and world.sender.stats.kv_chunks == 0
        assert world.receiver.stats.outcomes == world.sender.stats.outcomes == {"full": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_many_at_once_share_a_small_ring(transport: str) -> None:
    async with rig(transport) as world:
        offers = [world.offer(50 + i) for i in range(12)]
        pools = [Pool() for _ in offers]
        for offer in offers:
            world.compute(offer)
        await asyncio.gather(
            *(world.collect(offer, pool) for offer, pool in zip(offers, pools, strict=True))
        )
        for offer, pool in zip(offers, pools, strict=True):
            assert pool.kv == expected(offer.handover_id, offer.num_positions)


@pytest.mark.parametrize(
    ("sender_buffer", "receiver_buffer"),
    [(BUFFER_BYTES, 4 * BUFFER_BYTES), (4 * BUFFER_BYTES, BUFFER_BYTES)],
)
async def test_buffers_may_differ_in_size(sender_buffer: int, receiver_buffer: int) -> None:
    async with rig(
        sender_buffer_bytes=sender_buffer, receiver_buffer_bytes=receiver_buffer
    ) as world:
        offer, pool = world.offer(100), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 100)


async def test_kv_chunks_are_sealed_against_changes_on_an_isolated_network() -> None:
    ucx = Ucx(KvNetwork.ISOLATED)
    async with rig(sender_ucx=ucx, receiver_ucx=ucx) as world:
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 40)


@pytest.mark.deep
async def test_a_long_wait_for_prefill_is_bridged_by_heartbeats() -> None:
    """Four times what either side takes for death."""
    async with rig(liveness=Liveness(heartbeat_s=0.2, missed=5)) as world:
        offer, pool = world.offer(20), Pool()
        collecting = asyncio.create_task(world.collect(offer, pool))
        await asyncio.sleep(4.0)
        assert not collecting.done()
        world.compute(offer)
        await collecting
        assert pool.kv == expected(offer.handover_id, 20)
