"""Reads that end late or never: their buffers wait orphaned and nothing else is held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.transfer import transports
from batonlm.transfer.staging import ReadState, StagingBuffer, StagingPool, TransportError
from batonlm.transfer.transports import Staging, TransferReader
from batonlm.v1 import handover_pb2 as pb
from tests.kv.rig import until

RING = pb.StagingPoolDescription(buffer_bytes=4096, num_buffers=4)


class Hesitant:
    """A transport whose reads end when the test says so. A handle is the remote buffer's number."""

    name = "hesitant"

    def __init__(self) -> None:
        self.verdicts: dict[int, ReadState] = {}
        self.held: set[int] = set()
        self.peers: set[str] = set()
        self.released: list[int] = []
        self.removed: list[str] = []
        self.closed = False

    def metadata(self) -> bytes:
        return b"hesitant"

    def add_peer(self, peer: str, metadata: bytes, ring: pb.StagingPoolDescription) -> None:
        self.peers.add(peer)

    def remove_peer(self, peer: str) -> None:
        self.peers.discard(peer)
        self.removed.append(peer)

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        if peer not in self.peers:
            raise TransportError("unknown peer")
        return remote_buffer

    def poll(self, handle: object) -> ReadState:
        assert isinstance(handle, int)
        return self.verdicts.get(handle, ReadState.RUNNING)

    def release(self, handle: object) -> None:
        assert isinstance(handle, int) and self.verdicts[handle] is not ReadState.RUNNING
        if handle in self.held:
            raise TransportError("still held")
        self.released.append(handle)

    def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def reading(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Hesitant, TransferReader, StagingPool]]:
    monkeypatch.setattr(transports, "ORPHANED_NAP_S", 0.01)
    transport, ring = Hesitant(), StagingPool(4, 4096)
    reader = TransferReader(lambda: transport)
    await reader.start()
    await reader.add_peer("peer", b"", RING)
    yield transport, reader, ring
    await reader.close()
    ring.close()


def taken(ring: StagingPool) -> StagingBuffer:
    buffer = ring.take("peer")
    assert buffer is not None
    return buffer


async def test_a_read_ends_when_the_transport_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        buffer = taken(ring)
        read = asyncio.create_task(reader.read("peer", 0, buffer, 100, 20))
        await until(lambda: not reader.idle)
        assert not read.done()
        transport.verdicts[0] = ReadState.DONE
        await read
        assert transport.released == [0]
        buffer.release()
        assert ring.num_free == 4 and ring.num_orphaned == 0


async def test_a_failed_read_raises_and_its_buffer_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        transport.verdicts[0] = ReadState.FAILED
        buffer = taken(ring)
        with pytest.raises(TransportError, match="failed"):
            await reader.read("peer", 0, buffer, 100, 20)
        buffer.release()
        assert ring.num_free == 4


async def test_what_cannot_be_posted_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(monkeypatch) as (_, reader, ring):
        buffer = taken(ring)
        with pytest.raises(TransportError):
            await reader.read("stranger", 0, buffer, 100, 20)
        buffer.release()
        assert ring.num_free == 4


@pytest.mark.parametrize("verdict", [ReadState.DONE, ReadState.FAILED])
async def test_a_late_read_keeps_its_buffer_orphaned(
    monkeypatch: pytest.MonkeyPatch, verdict: ReadState
) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        buffer = taken(ring)
        with pytest.raises(TransportError, match="in time"):
            await reader.read("peer", 0, buffer, 100, 0.01)
        buffer.release()
        assert ring.num_orphaned == 1 and ring.num_free == 3
        assert buffer.index not in {taken(ring).index for _ in range(ring.share - 1)}
        transport.verdicts[0] = verdict
        await until(lambda: ring.num_orphaned == 0)
        assert transport.released == [0]
        assert ring.num_free == 4 - (ring.share - 1)


async def test_a_cancelled_read_keeps_its_buffer_orphaned(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        buffer = taken(ring)
        read = asyncio.create_task(reader.read("peer", 0, buffer, 100, 20))
        await until(lambda: not reader.idle)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        buffer.release()
        assert ring.num_orphaned == 1
        transport.verdicts[0] = ReadState.DONE
        await until(lambda: ring.num_free == 4)


async def test_a_handle_that_cannot_be_released_keeps_its_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        transport.held.add(0)
        transport.verdicts[0] = ReadState.FAILED
        buffer = taken(ring)
        with pytest.raises(TransportError, match="in time"):
            await reader.read("peer", 0, buffer, 100, 0.05)
        buffer.release()
        assert ring.num_orphaned == 1
        transport.held.clear()
        await until(lambda: ring.num_free == 4)


async def test_reads_orphaned_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        stuck, quick = taken(ring), taken(ring)
        with pytest.raises(TransportError):
            await reader.read("peer", 0, stuck, 100, 0.01)
        stuck.release()
        transport.verdicts[1] = ReadState.DONE
        await reader.read("peer", 1, quick, 100, 20)
        quick.release()
        transport.verdicts[0] = ReadState.DONE
        await until(lambda: ring.num_free == 4)


async def test_a_peer_is_removed_only_after_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(monkeypatch) as (transport, reader, ring):
        buffer, other = taken(ring), taken(ring)
        read = asyncio.create_task(reader.read("peer", 0, buffer, 100, 20))
        await until(lambda: not reader.idle)
        await reader.remove_peer("peer")
        assert transport.removed == []
        with pytest.raises(TransportError):
            await reader.read("peer", 1, other, 100, 20)
        transport.verdicts[0] = ReadState.DONE
        await read
        await until(lambda: transport.removed == ["peer"])
        buffer.release()
        other.release()


async def test_closing_with_a_read_orphaned_leaves_the_transport_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, ring = Hesitant(), StagingPool(4, 4096)
    reader = TransferReader(lambda: transport)
    await reader.start()
    await reader.add_peer("peer", b"", RING)
    buffer = taken(ring)
    with pytest.raises(TransportError):
        await reader.read("peer", 0, buffer, 100, 0.01)
    buffer.release()
    await reader.close()
    assert not transport.closed and not reader.idle
    assert ring.num_orphaned == 1


async def test_a_transport_that_cannot_start_is_an_error() -> None:
    def make() -> Hesitant:
        raise TransportError("no")

    reader = TransferReader(make)
    with pytest.raises(TransportError):
        await reader.start()
    await reader.close()


@pytest.mark.parametrize(
    ("transport", "names"),
    [("auto", ("nixl", "loopback")), ("nixl", ("nixl",)), ("loopback", ("loopback",))],
)
async def test_staging_offers_what_was_asked_for(transport: str, names: tuple[str, ...]) -> None:
    staging = await Staging.open("ab" * 16, transport=transport, num_buffers=2, buffer_bytes=4096)
    assert staging.names == names
    await staging.close()


async def test_staging_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TransportError("NIXL could not be started")

    monkeypatch.setattr("batonlm.transfer.nixl.NixlTransport", broken)
    staging = await Staging.open("ab" * 16, transport="auto", num_buffers=2, buffer_bytes=4096)
    assert staging.names == ("loopback",)
    await staging.close()
    with pytest.raises(Unavailable, match="nixl"):
        await Staging.open("ab" * 16, transport="nixl", num_buffers=2, buffer_bytes=4096)
    with pytest.raises(InvalidArgument):
        await Staging.open("ab" * 16, transport="rdma", num_buffers=2, buffer_bytes=4096)
