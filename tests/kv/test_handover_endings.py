"""Hand-overs that end early, at every stage and from either side: nothing wrong, nothing left."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.attempt import ChoiceTokens
from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoverFailed,
    Incompatible,
    Internal,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from baton.core.handover import LIMITS, CollectorState, GiverState, Limit, State
from baton.kv import giver as giver_module
from baton.kv.collector import Collected
from baton.kv.giver import Offer, Outcome
from baton.kv.line import Liveness
from baton.kv.reader import Reader
from tests.kv.rig import LAYOUT, TOKENS, Pool, Rig, expected, identity, kv_of, rig, until

STAGES = ("opened", "reserving", "packing", "unpacking", "waiting for token 0")


class Reserving(Pool):
    """Answers the reservation only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_reserve = asyncio.Event()
        self.may_reserve.set()
        self.reserving = False

    async def reserve(self) -> int | None:
        self.reserving = True
        await self.may_reserve.wait()
        return await super().reserve()


async def at(stage: str, world: Rig) -> tuple[Offer, Reserving, asyncio.Task[Collected]]:
    """A hand-over of 40 positions that has come to a stage and stays there."""
    offer, pool = world.offer(40), Reserving()
    collecting = asyncio.create_task(world.collect(offer, pool))
    await until(lambda: offer.side.state is GiverState.OPENED)
    if stage == "reserving":
        pool.may_reserve.clear()
    if stage == "packing":
        world.may_pack.clear()
    if stage == "unpacking":
        pool.may_unpack.clear()
    if stage != "opened":
        offer.announce()
    if stage not in ("opened", "reserving"):
        offer.advance(40)
    conditions: dict[str, Callable[[], bool]] = {
        "opened": lambda: True,
        "reserving": lambda: pool.reserving,
        "packing": lambda: world.given.ring.num_free < world.given.ring.num_slots,
        "unpacking": lambda: pool.unpacking > 0,
        "waiting for token 0": lambda: len(pool.kv) == 40,
    }
    await until(conditions[stage])
    return offer, pool, collecting


def let_go(world: Rig, pool: Reserving) -> None:
    world.may_pack.set()
    pool.may_unpack.set()
    pool.may_reserve.set()


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
@pytest.mark.parametrize("stage", STAGES)
async def test_the_collector_is_cancelled(stage: str, transport: str) -> None:
    async with rig(transport) as world:
        offer, pool, collecting = await at(stage, world)
        collecting.cancel()
        if stage == "unpacking":
            await asyncio.wait([collecting], timeout=0.1)
            assert not collecting.done(), "blocks are still being written"
        if stage == "packing":
            await asyncio.wait([collecting])
            ending = asyncio.ensure_future(offer.wait())
            await asyncio.wait([ending], timeout=0.1)
            assert not ending.done(), "blocks are still being read"
        let_go(world, pool)
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert pool.unpacking == 0
        outcome = await offer.wait()
        assert outcome.outcome is Outcome.FAILED and isinstance(outcome.error, Cancelled)


@pytest.mark.parametrize("stage", STAGES)
async def test_the_giver_gives_up(stage: str) -> None:
    async with rig() as world:
        offer, pool, collecting = await at(stage, world)
        offer.fail(Cancelled("the client left"))
        await asyncio.sleep(0.05)
        let_go(world, pool)
        with pytest.raises(Cancelled, match="the client left"):
            await collecting
        outcome = await offer.wait()
        assert outcome.outcome is Outcome.FAILED and isinstance(outcome.error, Cancelled)


@pytest.mark.parametrize("stage", STAGES)
async def test_the_giver_leaves(stage: str) -> None:
    async with rig() as world:
        offer, pool, collecting = await at(stage, world)
        closing = asyncio.create_task(world.giver.close())
        await asyncio.sleep(0.05)
        let_go(world, pool)
        with pytest.raises(HandoverFailed, match="leaving"):
            await collecting
        await closing
        assert isinstance((await offer.wait()).error, Unavailable)


@pytest.mark.parametrize("stage", STAGES)
async def test_the_stream_breaks(stage: str) -> None:
    async with rig() as world:
        offer, pool, collecting = await at(stage, world)
        await world.cut()
        await asyncio.sleep(0.05)
        let_go(world, pool)
        with pytest.raises(HandoverFailed):
            await collecting
        outcome = await offer.wait()
        assert outcome.outcome is Outcome.FAILED and isinstance(outcome.error, Unavailable)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (GiverState.OPENED, "opened"),
        (GiverState.ANNOUNCED, "reserving"),
        (GiverState.GIVING, "waiting for token 0"),
        (CollectorState.OPENING, "opened"),
        (CollectorState.RESERVING, "reserving"),
        (CollectorState.TAKING, "waiting for token 0"),
    ],
)
async def test_every_states_deadline_ends_both_sides(state: State, stage: str) -> None:
    limits = {**LIMITS, state: Limit("the test", 0.3)}
    async with rig(limits=limits) as world:
        offer, _, collecting = await at(stage, world)
        with pytest.raises(HandoverFailed, match="too long"):
            await collecting
        outcome = await offer.wait()
        assert outcome.outcome is Outcome.FAILED
        assert isinstance(outcome.error, DeadlineExceeded)


@pytest.mark.parametrize("whose", ["giver", "collector"])
async def test_the_deadline_of_the_whole_ends_both_sides(whose: str) -> None:
    async with rig() as world:
        offer = world.offer(20, deadline_s=0.3 if whose == "giver" else 60)
        ticket = world.ticket(offer, deadline_s=0.3 if whose == "collector" else 60)
        pool = Pool()
        with pytest.raises(HandoverFailed, match="out of time"):
            await world.collector.collect(ticket, pool.reserve, pool.unpack)
        assert isinstance((await offer.wait()).error, DeadlineExceeded)


async def test_an_offer_nobody_collects_ends() -> None:
    limits = {**LIMITS, GiverState.OFFERED: Limit("the test", 0.05)}
    async with rig(limits=limits) as world:
        outcome = await world.offer(20).wait()
        assert outcome.outcome is Outcome.FAILED and isinstance(outcome.error, DeadlineExceeded)


async def test_an_offer_can_be_withdrawn_before_anyone_came() -> None:
    async with rig() as world:
        offer = world.offer(20)
        offer.fail(Cancelled("cancelled"))
        assert isinstance((await offer.wait()).error, Cancelled)
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, Pool())


async def test_an_id_works_once() -> None:
    async with rig() as world:
        offer, pool = world.offer(20), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        replayed = Pool()
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, replayed)
        assert not replayed.kv
        with pytest.raises(InvalidArgument, match="used before"):
            world.offer(20, handover_id=offer.handover_id)


async def test_a_second_collector_neither_gets_nor_disturbs_a_hand_over() -> None:
    async with rig() as world:
        offer, pool, collecting = await at("opened", world)
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, Pool())
        world.compute(offer)
        await collecting
        assert pool.kv == expected(offer.handover_id, 40)


async def test_only_the_collector_it_was_made_for_gets_a_hand_over() -> None:
    async with rig() as world:
        mine = world.collecting_as
        world.collecting_as = identity("decode")
        offer = world.offer(20)
        world.collecting_as = mine
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, Pool())
        assert world.giver.num_offers == 1, "a stranger does not end it"
        offer.fail(Cancelled("cancelled"))


async def test_an_unknown_id_waits_a_moment_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver_module, "DOOR_S", 0.1)
    async with rig() as world:
        pool = Pool()
        ticket = world.ticket_for(secrets.token_bytes(16), 20)
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collector.collect(ticket, pool.reserve, pool.unpack)
        assert world.giver.num_at_the_door == 0


async def test_the_door_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver_module, "MAX_AT_THE_DOOR", 1)
    async with rig() as world:
        pool, first = Pool(), secrets.token_bytes(16)
        waiting = asyncio.create_task(
            world.collector.collect(world.ticket_for(first, 20), pool.reserve, pool.unpack)
        )
        await until(lambda: world.giver.num_at_the_door == 1)
        with pytest.raises(HandoverFailed, match="too many"):
            await world.collector.collect(
                world.ticket_for(secrets.token_bytes(16), 20), pool.reserve, pool.unpack
            )
        world.compute(world.offer(20, handover_id=first))
        await waiting


async def test_offers_and_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver_module, "MAX_OFFERS", 3)
    monkeypatch.setattr(giver_module, "MAX_TOMBSTONES", 2)
    async with rig() as world:
        offers = [world.offer(20) for _ in range(3)]
        with pytest.raises(Overloaded):
            world.offer(20)
        for offer in offers:
            offer.fail(Cancelled("cancelled"))
        assert world.giver.num_offers == 0
        assert world.giver.num_tombstones == 2


@pytest.mark.parametrize("handover_id", [b"", b"x" * 15, b"x" * 17])
async def test_malformed_ids_are_refused(handover_id: bytes) -> None:
    async with rig() as world:
        with pytest.raises(InvalidArgument, match="16 bytes"):
            world.giver.offer(handover_id, "", 1, Pool().unpack, deadline_s=1)
        pool = Pool()
        with pytest.raises(InvalidArgument, match="16 bytes"):
            await world.collector.collect(
                world.ticket_for(handover_id, 1), pool.reserve, pool.unpack
            )


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
@pytest.mark.parametrize(("byte", "kind"), [(0, "header"), (20, "header"), (128, "digest")])
async def test_a_flipped_bit_in_the_givers_slot_is_never_unpacked(
    transport: str, byte: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(transport) as world:
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.collector.meet(world.giver.identity)
        read = Reader.read
        flipped = 0

        async def read_corrupted(self: Reader, peer: str, remote_slot: int, *rest: object) -> None:
            nonlocal flipped
            if self is world.landed.readers[transport]:
                flipped += 1
                world.given.ring.view(remote_slot)[byte] ^= 1
            await read(self, peer, remote_slot, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Reader, "read", read_corrupted)
        with pytest.raises(HandoverFailed, match="not what was announced"):
            await world.collect(offer, pool)
        assert flipped > 0 and not pool.kv
        assert world.collector.stats.mismatches[kind] > 0
        assert (await offer.wait()).outcome is Outcome.FAILED


async def test_a_slot_in_use_again_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The giver's stream has ended and its slot carries another parcel when the read happens."""
    async with rig() as world:
        await world.collector.meet(world.giver.identity)
        stale, pool = world.offer(40), Pool()
        read = Reader.read

        async def read_late(self: Reader, peer: str, remote_slot: int, *rest: object) -> None:
            stale.fail(Cancelled("the client left"))
            await stale.wait()
            newer = world.giver.staging.ring.view(remote_slot)
            newer[128 : 128 + LAYOUT.bytes_per_position] = kv_of(b"another prompt", 0)
            await read(self, peer, remote_slot, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Reader, "read", read_late)
        world.compute(stale)
        with pytest.raises((HandoverFailed, Cancelled)):
            await world.collect(stale, pool)
        assert not pool.kv


async def test_another_model_is_refused_with_a_readable_difference() -> None:
    other = replace(LAYOUT, num_layers=3, model_digest="cd" * 32)
    async with rig(collector_layout=other) as world:
        with pytest.raises(Incompatible, match="num_layers: 2 against 3"):
            await world.collector.meet(world.giver.identity)
        offer = world.offer(20)
        with pytest.raises(Incompatible, match="model_digest"):
            await world.collect(offer, Pool())
        offer.fail(Cancelled("cancelled"))


async def test_an_address_that_belongs_to_a_newer_process_is_refused() -> None:
    async with rig() as world:
        older = replace(world.giver.identity, incarnation="0" * 32)
        with pytest.raises(Unavailable, match="another process"):
            await world.collector.meet(older)
        offer, pool = world.offer(20), Pool()
        ticket = replace(world.ticket(offer), giver=older)
        with pytest.raises(HandoverFailed, match="another process"):
            await world.collector.collect(ticket, pool.reserve, pool.unpack)
        world.compute(offer)
        await world.collect(offer, pool)


async def test_a_giver_nobody_listens_at_is_a_failed_hand_over() -> None:
    async with rig() as world:
        pool = Pool()
        nobody = replace(identity("prefill"), address="127.0.0.1:1")
        ticket = replace(world.ticket_for(bytes(16), 1), giver=nobody)
        with pytest.raises(HandoverFailed):
            await world.collector.collect(ticket, pool.reserve, pool.unpack)


async def test_slots_too_small_for_a_position_are_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        async with rig(giver_layout=replace(LAYOUT, num_layers=100)):
            pass
    assert caught.value.field == "slot_mib"


class Clumsy(Reserving):
    """An engine with a fault in one of its calls."""

    def __init__(self, where: str, fault: Exception) -> None:
        super().__init__()
        self.where, self.fault = where, fault

    async def reserve(self) -> int | None:
        if self.where == "reserve":
            raise self.fault
        return 0

    async def unpack(self, first_position: int, count: int, payload: memoryview) -> None:
        raise self.fault


@pytest.mark.parametrize("where", ["reserve", "unpack"])
@pytest.mark.parametrize(
    ("fault", "seen"), [(Overloaded("no blocks"), Overloaded), (ZeroDivisionError(), Internal)]
)
async def test_a_fault_of_the_collecting_engine_ends_both_sides(
    where: str, fault: Exception, seen: type[BatonError]
) -> None:
    async with rig() as world:
        offer = world.offer(40)
        world.compute(offer)
        with pytest.raises(seen):
            await world.collect(offer, Clumsy(where, fault))
        assert isinstance((await offer.wait()).error, seen)


async def test_a_fault_of_the_giving_engine_ends_both_sides() -> None:
    async with rig() as world:

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            raise ZeroDivisionError

        offer = world.giver.offer(
            bytes(16), world.collecting_as.incarnation, 20, pack, deadline_s=60
        )
        world.compute(offer)
        with pytest.raises(HandoverFailed):
            await world.collect(offer, Pool())
        assert isinstance((await offer.wait()).error, Internal)


async def test_silence_of_the_giver_is_death() -> None:
    """Its answers stop although its connection stands: the collector does not wait for ever."""
    async with rig(liveness=Liveness(heartbeat_s=0.05, missed=4)) as world:
        offer, _, collecting = await at("waiting for token 0", world)
        world.silence()
        with pytest.raises(HandoverFailed, match=r"silent|left"):
            await collecting
        assert (await offer.wait()).outcome is Outcome.FAILED


async def test_tokens_of_several_choices_arrive_in_order() -> None:
    async with rig() as world:
        key = TOKENS[0].key
        tokens = [ChoiceTokens(key._replace(choice=c), 0, (c + 5,)) for c in range(4)]
        offer, pool = world.offer(20), Pool()
        offer.announce()
        offer.advance(20)
        offer.tokens(tokens)
        assert (await world.collect(offer, pool)).tokens == tuple(tokens)


async def test_the_deadline_covers_meeting_the_giver() -> None:
    """Something listens at the address and never answers."""
    async with rig() as world:
        pool = Pool()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            giver = replace(identity("prefill"), address=f"127.0.0.1:{silent.getsockname()[1]}")
            ticket = replace(world.ticket_for(bytes(16), 1), giver=giver, deadline_s=0.2)
            with pytest.raises(HandoverFailed, match="in time"):
                await world.collector.collect(ticket, pool.reserve, pool.unpack)
