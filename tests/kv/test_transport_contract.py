"""What every KvTransport promises, over a peer in this process and over one in another."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator

import pytest

from batonlm.transfer.staging import HostMemory, KvTransport, ReadState, StagingPool, TransportError
from batonlm.v1 import handover_pb2 as pb
from tests.kv.neighbours import Neighbour, neighbour
from tests.kv.ring_process import fill, make
from tests.shared_memory import abandoned

NUM_BUFFERS, BUFFER_BYTES = 4, 65536


class Pair:
    """Our transport, and a peer that it has met. The peer's buffer i is full of the byte i + 1."""

    def __init__(
        self,
        ring: StagingPool,
        transport: KvTransport,
        peer: str,
        metadata: bytes,
        description: pb.StagingPoolDescription,
    ) -> None:
        self.ring, self.transport = ring, transport
        self.peer, self.metadata, self.description = peer, metadata, description
        transport.add_peer(peer, metadata, description)

    def read(self, remote_buffer: int, local_buffer: int, size: int) -> ReadState:
        handle = self.transport.post(self.peer, remote_buffer, local_buffer, size)
        deadline = time.monotonic() + 120
        while (state := self.transport.poll(handle)) is ReadState.RUNNING:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.transport.release(handle)
        return state


@pytest.fixture(scope="module", params=["loopback", "nixl"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def other(name: str) -> Iterator[Neighbour]:
    with neighbour(name, NUM_BUFFERS, BUFFER_BYTES) as process:
        yield process


@pytest.fixture(params=["same process", "other process"])
def pair(name: str, other: Neighbour, request: pytest.FixtureRequest) -> Iterator[Pair]:
    ring = StagingPool(NUM_BUFFERS, BUFFER_BYTES)
    transport = make(name, ring, secrets.token_hex(16))
    try:
        if request.param == "other process":
            yield Pair(ring, transport, other.instance_id, other.metadata, other.ring)
        else:
            theirs = StagingPool(NUM_BUFFERS, BUFFER_BYTES)
            fill(theirs)
            instance_id = secrets.token_hex(16)
            peer = make(name, theirs, instance_id)
            yield Pair(ring, transport, instance_id, peer.metadata(), theirs.describe())
            transport.close()
            peer.close()
            theirs.close()
    finally:
        transport.close()
        ring.close()


@pytest.mark.deep
def test_a_read_brings_exactly_the_bytes_asked_for(pair: Pair) -> None:
    assert pair.read(2, 1, BUFFER_BYTES - 100) is ReadState.DONE
    assert bytes(pair.ring.view(1)) == bytes([3]) * (BUFFER_BYTES - 100) + bytes(100)
    for index in (0, 2, 3):
        assert bytes(pair.ring.view(index)) == bytes(BUFFER_BYTES)


def test_many_reads_at_once(pair: Pair) -> None:
    handles = [pair.transport.post(pair.peer, i, i, BUFFER_BYTES) for i in range(NUM_BUFFERS)]
    deadline = time.monotonic() + 120
    while any(pair.transport.poll(handle) is not ReadState.DONE for handle in handles):
        assert time.monotonic() < deadline
    for index, handle in enumerate(handles):
        pair.transport.release(handle)
        assert bytes(pair.ring.view(index)) == bytes([index + 1]) * BUFFER_BYTES


@pytest.mark.parametrize(
    ("remote_buffer", "local_buffer", "size"),
    [
        (NUM_BUFFERS, 0, 10),
        (-1, 0, 10),
        (0, NUM_BUFFERS, 10),
        (0, -1, 10),
        (0, 0, 0),
        (0, 0, BUFFER_BYTES + 1),
    ],
)
def test_nothing_outside_a_buffer_is_touched(
    pair: Pair, remote_buffer: int, local_buffer: int, size: int
) -> None:
    with pytest.raises(TransportError):
        pair.transport.post(pair.peer, remote_buffer, local_buffer, size)


def test_unknown_and_removed_peers_cannot_be_read(pair: Pair) -> None:
    with pytest.raises(TransportError):
        pair.transport.post("nobody", 0, 0, 10)
    pair.transport.remove_peer("nobody")
    pair.transport.remove_peer(pair.peer)
    with pytest.raises(TransportError):
        pair.transport.post(pair.peer, 0, 0, 10)


def test_a_removed_peer_can_be_met_again(pair: Pair) -> None:
    assert pair.read(0, 0, 100) is ReadState.DONE
    pair.transport.remove_peer(pair.peer)
    pair.transport.add_peer(pair.peer, pair.metadata, pair.description)
    assert pair.read(1, 0, 100) is ReadState.DONE
    assert bytes(pair.ring.view(0)[:101]) == bytes([2]) * 100 + bytes(1)


@pytest.mark.parametrize("metadata", [b"", b"x", b"\xff" * 500])
def test_nonsense_for_metadata_is_refused(pair: Pair, metadata: bytes) -> None:
    with pytest.raises(TransportError):
        pair.transport.add_peer("other", metadata, pair.description)
    with pytest.raises(TransportError):
        pair.transport.post("other", 0, 0, 10)
    assert pair.read(0, 0, 100) is ReadState.DONE


def test_closing_twice_is_no_error(pair: Pair) -> None:
    pair.transport.close()
    pair.transport.close()


@pytest.mark.deep
def test_a_killed_peer_never_makes_a_read_hang(name: str, other: Neighbour) -> None:
    ring = StagingPool(NUM_BUFFERS, BUFFER_BYTES)
    transport = make(name, ring, secrets.token_hex(16))
    with neighbour(name, NUM_BUFFERS, BUFFER_BYTES) as victim:
        pair = Pair(ring, transport, victim.instance_id, victim.metadata, victim.ring)
        assert pair.read(0, 0, BUFFER_BYTES) is ReadState.DONE
        victim.process.kill()
        victim.process.wait()
        for _ in range(3):
            try:
                state = pair.read(1, 1, BUFFER_BYTES)
            except TransportError:
                continue
            if state is ReadState.DONE:
                assert bytes(ring.view(1)) == bytes([2]) * BUFFER_BYTES
        transport.remove_peer(victim.instance_id)
    pair = Pair(ring, transport, other.instance_id, other.metadata, other.ring)
    assert pair.read(3, 3, BUFFER_BYTES) is ReadState.DONE
    transport.close()
    ring.close()


def test_loopback_refuses_memory_that_is_not_the_rings() -> None:
    """A ring that could shrink under its reader would turn a read into a crash."""
    ring, theirs = StagingPool(2, 4096), StagingPool(2, 4096)
    transport = make("loopback", ring, "")
    metadata = make("loopback", theirs, "").metadata()
    with pytest.raises(TransportError, match="not what it described"):
        other = pb.StagingPoolDescription(buffer_bytes=4096, num_buffers=3)
        transport.add_peer("peer", metadata, other)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 8192)
    memory = theirs.memory
    assert isinstance(memory, HostMemory)
    original, memory.fd = memory.fd, unsealed
    with pytest.raises(TransportError, match="shrink"):
        transport.add_peer("peer", make("loopback", theirs, "").metadata(), theirs.describe())
    os.close(unsealed)
    memory.fd = original
    theirs.close()
    with pytest.raises(TransportError):
        transport.add_peer(
            "peer", metadata, pb.StagingPoolDescription(buffer_bytes=4096, num_buffers=2)
        )
    ring.close()


def test_killed_processes_leave_no_shared_memory_behind() -> None:
    before = abandoned()
    with neighbour("loopback", NUM_BUFFERS, BUFFER_BYTES) as other:
        other.process.kill()
        other.process.wait()
    deadline = time.monotonic() + 120
    while not abandoned() <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
