"""Faults that are injected happen, are found, and leave nothing behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton_loadtest.chaos.corruptions import INJECTIONS, with_settings
from batonlm.core.errors import HandoverFailed
from batonlm.core.handover.table import LIMITS, ReceiverState, SenderState, StateLimit
from batonlm.testing.faults import (
    MESSAGE_POINTS,
    POINTS,
    RECEIVER_WORK,
    SENDER_WORK,
    TRANSPORT_READ,
    FaultInjector,
    FaultSpec,
    parse,
)
from batonlm.transfer.kv_chunk import Sealer
from tests.kv.rig import POSITIONS_PER_BUFFER, Pool, expected, rig

POSITIONS = 5 * POSITIONS_PER_BUFFER


@pytest.mark.parametrize("rule", INJECTIONS.values(), ids=list(INJECTIONS))
async def test_damage_is_found_and_the_next_hand_over_is_right(rule: str) -> None:
    giving, taking = FaultInjector(FaultSpec()), FaultInjector(FaultSpec())
    async with rig(sender_faults=giving, receiver_faults=taking) as world:
        for _ in range(2):
            offer, pool = world.offer(POSITIONS), Pool()
            world.compute(offer)
            await world.collect(offer, pool)
        at_sender = "@sender." in rule
        (giving if at_sender else taking).arm(parse(with_settings(rule, at=3)))
        offer, pool = world.offer(POSITIONS), Pool()
        world.compute(offer)
        with pytest.raises(HandoverFailed, match="what was announced"):
            await world.collect(offer, pool)
        assert pool.kv.items() <= expected(offer.handover_id, POSITIONS).items()
        assert giving.injected.total() + taking.injected.total() == 1
        offer, pool = world.offer(POSITIONS), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, POSITIONS)


@pytest.mark.parametrize("rule", [r for r in INJECTIONS.values() if "payload" in r])
async def test_unseen_damage_would_reach_the_blocks(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without verification the same faults are wrong KV: it is they that are found above."""
    monkeypatch.setattr(Sealer, "mismatch", lambda *_: "")
    faults = FaultInjector(FaultSpec())
    async with rig(sender_faults=faults, receiver_faults=faults) as world:
        for wrong in (False, True):
            offer, pool = world.offer(POSITIONS), Pool()
            world.compute(offer)
            await world.collect(offer, pool)
            assert (pool.kv != expected(offer.handover_id, POSITIONS)) == wrong
            faults.arm(parse(with_settings(rule, at=2)))


async def test_every_point_is_reached() -> None:
    """By hand-overs that go well, or are refused for want of room."""
    giving, taking = FaultInjector(FaultSpec()), FaultInjector(FaultSpec())
    async with rig(sender_faults=giving, receiver_faults=taking) as world:
        for cached in (0, None):
            offer, pool = world.offer(POSITIONS), Pool(cached)
            world.compute(offer)
            collecting = asyncio.create_task(world.collect(offer, pool))
            await asyncio.wait([collecting])
            assert (collecting.exception() is None) == (cached == 0)
    mine = {p for p in MESSAGE_POINTS if p.startswith("sender.")} | set(SENDER_WORK)
    assert set(giving.reached) == mine
    assert set(taking.reached) == set(POINTS) - mine
    assert {*RECEIVER_WORK, TRANSPORT_READ} <= set(taking.reached)


SOON = {
    **LIMITS,
    **{
        state: StateLimit("a test", 2.0)
        for state in (*SenderState, *ReceiverState)
        if state in LIMITS
    },
}


@pytest.mark.deep
@pytest.mark.parametrize(
    "point", [p for p in MESSAGE_POINTS if "refused" not in p and p != "sender.completed"]
)
async def test_a_message_that_is_lost_ends_in_time(point: str) -> None:
    """Though the stream lives and beats; whoever waits for the message stops waiting."""
    faults = FaultInjector(parse(f"drop@{point}:at=1"))
    giving, taking = (faults, FaultInjector(FaultSpec()))[
        :: 1 if point.startswith("sender") else -1
    ]
    async with rig(sender_faults=giving, receiver_faults=taking, limits=SOON) as world:
        offer, pool = world.offer(POSITIONS), Pool()
        world.compute(offer)
        collecting = asyncio.create_task(world.collect(offer, pool))
        async with asyncio.timeout(120):
            ended = await offer.wait()
            await asyncio.wait([collecting])
        assert faults.injected.total() == 1
        assert pool.kv.items() <= expected(offer.handover_id, POSITIONS).items()
        if point.endswith(("confirmed", "completed")):
            # The receiver has all it needs, whatever the sender can know.
            assert pool.kv == expected(offer.handover_id, POSITIONS)
        else:
            assert isinstance(collecting.exception(), HandoverFailed) and ended.error is not None


async def test_a_read_that_is_told_late_is_waited_for() -> None:
    taking = FaultInjector(parse("delay@transport.read:seconds=0.2,at=3"))
    async with rig(receiver_faults=taking) as world:
        offer, pool = world.offer(POSITIONS), Pool()
        world.compute(offer)
        began = time.monotonic()
        await world.collect(offer, pool)
        assert time.monotonic() - began >= 0.2
        assert pool.kv == expected(offer.handover_id, POSITIONS)


async def test_the_same_seed_breaks_the_same_things() -> None:
    async def broken(seed: int) -> list[int]:
        faults = FaultInjector(parse(f"seed={seed};drop@sender.told:rate=0.3"))
        return [n for n in range(200) if faults.due("sender.told")]

    assert await broken(1) == await broken(1) != await broken(2)
    assert 30 < len(await broken(1)) < 90
