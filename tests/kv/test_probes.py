"""Probes between two workers: part of meeting, repeated while idle, never counted as traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from batonlm.core.errors import Incompatible, InvalidArgument
from batonlm.rpc.convert import identity_to_proto
from batonlm.transfer.staging import TransportError
from batonlm.transfer.transports import TransferReader
from batonlm.v1 import handover_pb2 as pb
from tests.kv.rig import BUFFER_BYTES, POSITIONS_PER_BUFFER, Pool, Rig, expected, rig, until

EVERY_S = 0.05


def corrupt(
    monkeypatch: pytest.MonkeyPatch, world: Rig, broken: Callable[[str, int], bool]
) -> list[str]:
    """Flips a bit of what the sender's buffer holds before each read that `broken` picks, by
    transport and number of the read. Returns the transports of all reads so far."""
    read, reads = TransferReader.read, list[str]()

    async def read_corrupted(
        self: TransferReader, peer: str, remote_buffer: int, *rest: object
    ) -> None:
        reads.append(self.name)
        if broken(self.name, len(reads)):
            world.given.ring.view(remote_buffer)[200] ^= 1
        await read(self, peer, remote_buffer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TransferReader, "read", read_corrupted)
    return reads


def probes(world: Rig, outcome: str = "ok") -> int:
    return world.receiver.stats.probes["peer", outcome]


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
async def test_meeting_collects_a_probe_that_counts_as_nothing_else(transport: str) -> None:
    async with rig(transport) as world:
        await world.receiver.meet(world.sender.identity)
        await world.receiver.meet(world.sender.identity)
        assert probes(world) == world.receiver.stats.peers_met == 1
        for stats in (world.receiver.stats, world.sender.stats):
            assert not stats.kv_chunks and not stats.outcomes and not stats.stages
        assert world.sender.num_recent_ids == 0
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 40)


async def test_a_transport_that_brings_other_bytes_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig("auto") as world:
        reads = corrupt(monkeypatch, world, lambda name, _: name == "nixl")
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 40)
        assert reads[:2] == ["nixl", "loopback"] and set(reads[1:]) == {"loopback"}
        assert (probes(world), probes(world, "mismatch")) == (1, 1)


async def test_a_sender_that_no_transport_reaches_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as world:
        corrupt(monkeypatch, world, lambda *_: True)
        name = f"prefill {world.sender.identity.instance_id[:8]}"
        with pytest.raises(Incompatible, match=f"{name} cannot be reached: tried loopback"):
            await world.receiver.meet(world.sender.identity)
        assert world.receiver.stats.peers_met == 0


async def test_an_unreadable_sender_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: TransferReader, *_: object) -> None:
        raise TransportError("no")

    async with rig() as world:
        monkeypatch.setattr(TransferReader, "read", fail)
        with pytest.raises(Incompatible, match="could not be read"):
            await world.receiver.meet(world.sender.identity)
        assert probes(world, "unreadable") == 1


async def test_an_idle_peer_is_probed_again_and_again() -> None:
    async with rig("nixl") as world:
        await world.receiver.meet(world.sender.identity)
        world.receiver.start_probing(EVERY_S)
        await until(lambda: probes(world) > 3)
        assert world.receiver.stats.peers_met == 1


async def test_no_probe_disturbs_hand_overs() -> None:
    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        offer, pool = world.offer(40), Pool()
        collecting = asyncio.create_task(world.collect(offer, pool))
        await until(lambda: not world.receiver.idle)
        world.receiver.start_probing(EVERY_S)
        # Nothing tells that no probe was sent, so this gives one the time for it.
        await asyncio.sleep(6 * EVERY_S)
        assert probes(world) == 1
        world.compute(offer)
        await collecting
        await until(lambda: probes(world) > 1)


async def test_one_failed_probe_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        corrupt(monkeypatch, world, lambda _, number: number % 2 == 1)
        world.receiver.start_probing(EVERY_S)
        await until(lambda: probes(world, "mismatch") > 2 and probes(world) > 3)
        assert world.receiver.stats.peers_met == 1


async def test_two_failed_probes_in_a_row_make_a_new_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig("auto") as world:
        await world.receiver.meet(world.sender.identity)
        reads = corrupt(monkeypatch, world, lambda name, _: name == "nixl")
        world.receiver.start_probing(EVERY_S)
        await until(lambda: world.receiver.stats.peers_met == 2)
        assert reads[:4] == ["nixl", "nixl", "nixl", "loopback"], "two probes, then a meeting"
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 40)


@pytest.mark.deep
async def test_a_silent_peer_is_forgotten_and_met_when_it_is_wanted() -> None:
    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        world.silence()
        world.receiver.start_probing(EVERY_S)
        await until(lambda: probes(world, "lost") == 2 and world.receiver.stats.peers_met == 2)
        offer, pool = world.offer(40), Pool()
        world.compute(offer)
        await world.collect(offer, pool)
        assert pool.kv == expected(offer.handover_id, 40)


async def test_a_probe_larger_than_a_kv_chunk_is_refused() -> None:
    async with rig() as world:
        opening = pb.OpenHandover(
            handover_id=bytes(16),
            receiver=identity_to_proto(world.collecting_as),
            sender_instance_id=world.sender.identity.instance_id,
            max_kv_chunk_bytes=BUFFER_BYTES,
            probe_positions=POSITIONS_PER_BUFFER + 1,
        )
        with pytest.raises(InvalidArgument, match="one KV chunk"):
            await world.sender.claim(opening)
        assert world.sender.num_offers == 0
