"""Hand-overs that end early, at every stage and from either side: nothing wrong, nothing left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoverFailed,
    Internal,
    InvalidArgument,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from batonlm.core.handover.table import LIMITS, ReceiverState, SenderState, State, StateLimit
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.transfer.receiver import Collected
from batonlm.transfer.sender import PendingTransfer
from batonlm.transfer.stream import Liveness
from tests.kv.rig import TOKENS, Pool, Rig, identity, rig, until

ABOUT = {"request_id": "r1", "trace_id": "t1"}
STAGES = ("opened", "reserving", "packing", "unpacking", "waiting for token 0")
TRANSPORTS = ("loopback", pytest.param("device", marks=pytest.mark.deep))


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


async def at(stage: str, world: Rig) -> tuple[PendingTransfer, Reserving, asyncio.Task[Collected]]:
    """A hand-over of 40 positions that has come to a stage and stays there, if it does not end
    on the way."""
    offer, pool = world.offer(40), Reserving()
    collecting = asyncio.create_task(world.collect(offer, pool))
    await until(lambda: collecting.done() or offer.side.state is SenderState.OPENED)
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
        "packing": lambda: world.given.ring.num_free < world.given.ring.num_buffers,
        "unpacking": lambda: pool.unpacking > 0,
        "waiting for token 0": lambda: len(pool.kv) == 40,
    }
    await until(lambda: collecting.done() or conditions[stage]())
    return offer, pool, collecting


def let_go(world: Rig, pool: Reserving) -> None:
    world.may_pack.set()
    pool.may_unpack.set()
    pool.may_reserve.set()


@pytest.mark.deep
@pytest.mark.parametrize("transport", ["loopback", "nixl", "device"])
@pytest.mark.parametrize("stage", STAGES)
async def test_the_receiver_is_cancelled(stage: str, transport: str) -> None:
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
        assert outcome.label == "cancelled" and isinstance(outcome.error, Cancelled)
        assert world.receiver.stats.outcomes == world.sender.stats.outcomes == {"cancelled": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", STAGES)
async def test_the_sender_gives_up(stage: str, transport: str) -> None:
    async with rig(transport) as world:
        offer, pool, collecting = await at(stage, world)
        offer.fail(Cancelled("the client left"))
        await asyncio.sleep(0.05)
        let_go(world, pool)
        with pytest.raises(Cancelled, match="the client left"):
            await collecting
        outcome = await offer.wait()
        assert outcome.label == "cancelled" and isinstance(outcome.error, Cancelled)
        assert world.receiver.stats.outcomes == world.sender.stats.outcomes == {"cancelled": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", STAGES)
async def test_the_sender_leaves(stage: str, transport: str) -> None:
    async with rig(transport) as world:
        offer, pool, collecting = await at(stage, world)
        closing = asyncio.create_task(world.sender.close())
        await asyncio.sleep(0.05)
        let_go(world, pool)
        with pytest.raises(HandoverFailed, match="leaving"):
            await collecting
        await closing
        assert isinstance((await offer.wait()).error, Unavailable)


@pytest.mark.deep
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", STAGES)
async def test_the_stream_breaks(stage: str, transport: str) -> None:
    async with rig(transport) as world:
        offer, pool, collecting = await at(stage, world)
        await world.cut()
        await asyncio.sleep(0.05)
        let_go(world, pool)
        with pytest.raises(HandoverFailed):
            await collecting
        outcome = await offer.wait()
        assert outcome.label == "failed" and isinstance(outcome.error, Unavailable)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (SenderState.OPENED, "opened"),
        pytest.param(SenderState.ANNOUNCED, "reserving", marks=pytest.mark.deep),
        (SenderState.GIVING, "waiting for token 0"),
        (ReceiverState.OPENING, "opened"),
        pytest.param(ReceiverState.RESERVING, "reserving", marks=pytest.mark.deep),
        (ReceiverState.TAKING, "waiting for token 0"),
    ],
)
async def test_every_states_deadline_ends_both_sides(state: State, stage: str) -> None:
    limits = {**LIMITS, state: StateLimit("the test", 0.3)}
    async with rig(limits=limits) as world:
        offer, _, collecting = await at(stage, world)
        with pytest.raises(HandoverFailed, match="too long"):
            await collecting
        outcome = await offer.wait()
        assert outcome.label == "failed"
        assert isinstance(outcome.error, DeadlineExceeded)


@pytest.mark.parametrize("whose", [pytest.param("sender", marks=pytest.mark.deep), "receiver"])
async def test_the_deadline_of_the_whole_ends_both_sides(whose: str) -> None:
    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        offer = world.offer(20, deadline_s=1.0 if whose == "sender" else 60)
        ticket = world.ticket(offer, deadline_s=1.0 if whose == "receiver" else 60)
        pool = Pool()
        with pytest.raises(HandoverFailed, match="out of time"):
            await world.receiver.collect(ticket, pool.reserve, pool.unpack)
        assert isinstance((await offer.wait()).error, DeadlineExceeded)


async def test_an_offer_nobody_collects_ends() -> None:
    limits = {**LIMITS, SenderState.OFFERED: StateLimit("the test", 0.05)}
    async with rig(limits=limits) as world:
        outcome = await world.offer(20).wait()
        assert outcome.label == "failed" and isinstance(outcome.error, DeadlineExceeded)


async def test_an_offer_can_be_withdrawn_before_anyone_came() -> None:
    async with rig() as world:
        offer = world.offer(20)
        offer.fail(Cancelled("cancelled"))
        assert isinstance((await offer.wait()).error, Cancelled)
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, Pool())


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


async def test_a_fault_of_the_giving_engine_ends_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as world:

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            raise ZeroDivisionError

        offer = world.sender.offer(
            bytes(16), world.collecting_as.instance_id, 20, pack, deadline_s=60, about=ABOUT
        )
        world.compute(offer)
        with pytest.raises(HandoverFailed):
            await world.collect(offer, Pool())
        assert isinstance((await offer.wait()).error, Internal)
    assert about_in(caplog) == [ABOUT]


async def test_a_fault_of_ours_is_logged_with_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as world:
        offer = world.offer(40)
        world.compute(offer)
        clumsy = Clumsy("unpack", ZeroDivisionError())
        ticket = replace(world.ticket(offer), about=ABOUT)
        with pytest.raises(Internal):
            await world.receiver.collect(ticket, clumsy.reserve, clumsy.unpack)
    assert about_in(caplog) == [ABOUT]


def about_in(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """Whose the faults are that were logged."""
    lines = [vars(line) for line in caplog.records if line.name == "batonlm.transfer.stream"]
    return [{name: line[name] for name in ABOUT} for line in lines]


async def test_silence_of_the_sender_is_death() -> None:
    """Its answers stop although its connection stands: the receiver does not wait for ever."""
    async with rig(liveness=Liveness(heartbeat_s=0.05, missed=4)) as world:
        offer, _, collecting = await at("waiting for token 0", world)
        world.silence()
        with pytest.raises(HandoverFailed, match=r"silent|left"):
            await collecting
        assert (await offer.wait()).label == "failed"


@pytest.mark.parametrize(
    "status",
    [Unauthenticated("no token"), InvalidArgument("no"), Cancelled("no"), Overloaded("no")],
)
async def test_a_stream_that_ends_with_a_status_is_a_failed_hand_over(
    status: BatonError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither the client's fault nor a full pool of ours."""

    async def refuse(*_: object) -> None:
        raise status

    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        monkeypatch.setattr(world.sender, "serve", refuse)
        offer = world.offer(20)
        with pytest.raises(HandoverFailed, match=status.message):
            await world.collect(offer, Pool())
        assert world.receiver.stats.outcomes == {"failed": 1}
        offer.fail(Cancelled("cancelled"))


async def test_tokens_of_several_choices_arrive_in_order() -> None:
    async with rig() as world:
        key = TOKENS[0].key
        tokens = [ChoiceTokens(key._replace(choice=c), 0, (c + 5,)) for c in range(4)]
        offer, pool = world.offer(20), Pool()
        offer.announce()
        offer.advance(20)
        offer.tokens(tokens)
        assert (await world.collect(offer, pool)).tokens == tuple(tokens)


async def test_the_deadline_covers_meeting_the_sender() -> None:
    """Something listens at the address and never answers."""
    async with rig() as world:
        pool = Pool()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            sender = replace(identity("prefill"), address=f"127.0.0.1:{silent.getsockname()[1]}")
            ticket = replace(world.ticket_for(bytes(16), 1), sender=sender, deadline_s=0.2)
            with pytest.raises(HandoverFailed, match="in time"):
                await world.receiver.collect(ticket, pool.reserve, pool.unpack)
