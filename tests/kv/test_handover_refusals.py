"""What is refused: wrong KV, ids, peers and models. Nothing of it is ever unpacked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from batonlm.core.errors import (
    Cancelled,
    HandoverFailed,
    Incompatible,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
)
from batonlm.core.handover.table import EARLY_STREAM_S, SenderState
from batonlm.rpc.convert import identity_to_proto
from batonlm.transfer import sender as sender_module
from batonlm.transfer.peers import CollectStream
from batonlm.transfer.stream import parts
from batonlm.transfer.transports import TransferReader
from batonlm.v1 import handover_pb2 as pb
from tests.kv.rig import LAYOUT, Pool, Wire, expected, identity, kv_of, rig, until


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


async def test_a_second_receiver_neither_gets_nor_disturbs_a_hand_over() -> None:
    async with rig() as world:
        offer, pool = world.offer(40), Pool()
        collecting = asyncio.create_task(world.collect(offer, pool))
        await until(lambda: offer.side.state is SenderState.OPENED)
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, Pool())
        world.compute(offer)
        await collecting
        assert pool.kv == expected(offer.handover_id, 40)


async def test_only_the_receiver_it_was_made_for_gets_a_hand_over() -> None:
    async with rig() as world:
        mine = world.collecting_as
        world.collecting_as = identity("decode")
        offer = world.offer(20)
        world.collecting_as = mine
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.collect(offer, Pool())
        assert world.sender.num_offers == 1, "a stranger does not end it"
        offer.fail(Cancelled("cancelled"))


async def test_an_unknown_id_waits_a_moment_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        # It is also the time that a stream has to say what it wants.
        monkeypatch.setattr(sender_module, "EARLY_STREAM_S", 0.5)
        pool = Pool()
        ticket = world.ticket_for(secrets.token_bytes(16), 20)
        with pytest.raises(HandoverFailed, match="not on offer"):
            await world.receiver.collect(ticket, pool.reserve, pool.unpack)
        assert world.sender.num_early_streams == 0


async def test_the_door_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MAX_EARLY_STREAMS", 1)
    async with rig() as world:
        pool, first = Pool(), secrets.token_bytes(16)
        waiting = asyncio.create_task(
            world.receiver.collect(world.ticket_for(first, 20), pool.reserve, pool.unpack)
        )
        await until(lambda: world.sender.num_early_streams == 1)
        with pytest.raises(HandoverFailed, match="too many"):
            await world.receiver.collect(
                world.ticket_for(secrets.token_bytes(16), 20), pool.reserve, pool.unpack
            )
        world.compute(world.offer(20, handover_id=first))
        await waiting


async def test_offers_and_recent_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MAX_OFFERS", 3)
    monkeypatch.setattr(sender_module, "MAX_RECENT_IDS", 2)
    async with rig() as world:
        offers = [world.offer(20) for _ in range(3)]
        with pytest.raises(Overloaded):
            world.offer(20)
        for offer in offers:
            offer.fail(Cancelled("cancelled"))
        assert world.sender.num_offers == 0
        assert world.sender.num_recent_ids == 2


@pytest.mark.parametrize("handover_id", [b"", b"x" * 15, b"x" * 17])
async def test_malformed_ids_are_refused(handover_id: bytes) -> None:
    async with rig() as world:
        with pytest.raises(InvalidArgument, match="16 bytes"):
            world.sender.offer(handover_id, "", 1, Pool().unpack, deadline_s=1)
        pool = Pool()
        with pytest.raises(InvalidArgument, match="16 bytes"):
            await world.receiver.collect(
                world.ticket_for(handover_id, 1), pool.reserve, pool.unpack
            )
        # Nobody can offer it, so its stream takes none of the places of those that wait.
        opening = pb.OpenHandover(
            handover_id=handover_id, sender_instance_id=world.sender.identity.instance_id
        )
        async with asyncio.timeout(EARLY_STREAM_S / 2):
            with pytest.raises(NotFound, match="not on offer"):
                await world.sender.claim(opening)


async def test_malformed_tokens_fail_the_hand_over_whenever_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in the few turns of the event loop in which the last KV chunk lands and all seems in."""
    pool, turns = Pool(), 0

    class Lying(CollectStream):
        async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
            async for whole in super().__aiter__():
                for message in parts(whole):
                    if message.HasField("tokens"):
                        await until(lambda: pool.unpacking == 1)
                        message.tokens.choices[0].token_ids = bytes(3)
                        pool.may_unpack.set()
                        for _ in range(turns):
                            await asyncio.sleep(0)
                    yield message

        async def send(self, message: pb.CollectRequest) -> None:
            # Confirmed at once, so that the number of turns does not depend on gRPC.
            for part in parts(message):
                if not part.HasField("collected"):
                    await super().send(part)

    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        monkeypatch.setattr(Wire, "collect", lambda self: Lying(self._stub.Collect()))
        for count in range(12):
            turns = count
            pool.may_unpack.clear()
            offer = world.offer(10)
            world.compute(offer)
            with pytest.raises(HandoverFailed, match="malformed"):
                await world.collect(offer, pool)
            assert (await offer.wait()).label == "failed"


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
@pytest.mark.parametrize(("byte", "kind"), [(0, "header"), (20, "header"), (128, "digest")])
async def test_a_flipped_bit_in_the_senders_buffer_is_never_unpacked(
    transport: str, byte: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(transport) as world:
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.receiver.meet(world.sender.identity)
        read = TransferReader.read
        flipped = 0

        async def read_corrupted(
            self: TransferReader, peer: str, remote_buffer: int, *rest: object
        ) -> None:
            nonlocal flipped
            if self is world.landed.readers[transport]:
                flipped += 1
                world.given.ring.view(remote_buffer)[byte] ^= 1
            await read(self, peer, remote_buffer, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(TransferReader, "read", read_corrupted)
        with pytest.raises(HandoverFailed, match="not what was announced"):
            await world.collect(offer, pool)
        assert flipped > 0 and not pool.kv
        assert world.receiver.stats.mismatches[kind] > 0
        assert (await offer.wait()).label == "failed"


async def test_a_buffer_in_use_again_does_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream has ended and the buffer carries another KV chunk when the read happens."""
    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        stale, pool = world.offer(40), Pool()
        read = TransferReader.read

        async def read_late(
            self: TransferReader, peer: str, remote_buffer: int, *rest: object
        ) -> None:
            stale.fail(Cancelled("the client left"))
            await stale.wait()
            newer = world.sender.staging.ring.view(remote_buffer)
            newer[128 : 128 + LAYOUT.bytes_per_position] = kv_of(b"another prompt", 0)
            await read(self, peer, remote_buffer, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(TransferReader, "read", read_late)
        world.compute(stale)
        with pytest.raises((HandoverFailed, Cancelled)):
            await world.collect(stale, pool)
        assert not pool.kv


async def test_another_model_is_refused_with_a_readable_difference() -> None:
    other = replace(LAYOUT, num_layers=3, model_digest="cd" * 32)
    async with rig(receiver_layout=other) as world:
        with pytest.raises(Incompatible, match=r"prefill .* and decode .*num_layers: 2 against 3"):
            await world.receiver.meet(world.sender.identity)
        offer = world.offer(20)
        with pytest.raises(Incompatible, match="model_digest"):
            await world.collect(offer, Pool())
        offer.fail(Cancelled("cancelled"))


async def test_a_wire_version_that_this_side_does_not_speak_is_refused() -> None:
    """Also of a receiver that has not met this sender."""
    async with rig() as world:
        offer = world.offer(20)
        opening = pb.OpenHandover(
            handover_id=offer.handover_id,
            receiver=identity_to_proto(world.collecting_as),
            sender_instance_id=world.sender.identity.instance_id,
            max_kv_chunk_bytes=1 << 20,
            wire_version=2,
        )
        with pytest.raises(Incompatible, match="wire versions 1-1, not 2"):
            await world.sender.claim(opening)
        offer.fail(Cancelled("cancelled"))


@pytest.mark.parametrize("ranges", [((1, 2), (2, 3)), ((2, 3), (1, 2)), ((1, 1), (1, 2))])
async def test_two_builds_meet_in_a_wire_version_that_both_speak(
    ranges: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """The newest common one; KV chunks carry it, so they verify on both sides."""
    sender_layout, receiver_layout = (
        replace(LAYOUT, min_wire_version=oldest, max_wire_version=newest)
        for oldest, newest in ranges
    )
    async with rig(sender_layout=sender_layout, receiver_layout=receiver_layout) as world:
        offer, pool = world.offer(20), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 20)


async def test_an_address_that_belongs_to_a_newer_process_is_refused() -> None:
    async with rig() as world:
        older = replace(world.sender.identity, instance_id="0" * 32)
        with pytest.raises(Unavailable, match="another process"):
            await world.receiver.meet(older)
        offer, pool = world.offer(20), Pool()
        ticket = replace(world.ticket(offer), sender=older)
        with pytest.raises(HandoverFailed, match="another process"):
            await world.receiver.collect(ticket, pool.reserve, pool.unpack)
        world.compute(offer)
        await world.collect(offer, pool)


async def test_a_sender_nobody_listens_at_is_a_failed_hand_over() -> None:
    async with rig() as world:
        pool = Pool()
        nobody = replace(identity("prefill"), address="127.0.0.1:1")
        ticket = replace(world.ticket_for(bytes(16), 1), sender=nobody)
        with pytest.raises(HandoverFailed):
            await world.receiver.collect(ticket, pool.reserve, pool.unpack)


async def test_buffers_too_small_for_a_position_are_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        async with rig(sender_layout=replace(LAYOUT, num_layers=100)):
            pass
    assert caught.value.field == "staging_mib"
