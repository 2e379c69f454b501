"""A worker proves its own way for KV, over every transport, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batonlm.core.errors import Unavailable
from batonlm.transfer.staging import TransportError
from batonlm.transfer.transports import Staging, TransferReader
from batonlm.worker.self_test import probe_self
from tests.kv.rig import BUFFER_BYTES, LAYOUT, POSITIONS_PER_BUFFER, identity, kv_of

ME = identity("decode")


@asynccontextmanager
async def opened(transport: str) -> AsyncIterator[Staging]:
    """With the smallest ring there may be; checked on leaving: all of it is free."""
    staging = await Staging.open(
        ME.instance_id, transport=transport, num_buffers=2, buffer_bytes=BUFFER_BYTES
    )
    try:
        yield staging
        assert staging.ring.num_free == 2
    finally:
        await staging.close()


async def probe_over(staging: Staging, name: str, count: int = POSITIONS_PER_BUFFER) -> bytes:
    """What came out of a probe."""
    out: list[bytes] = []

    async def pack(first_position: int, count: int, view: memoryview) -> None:
        view[:] = b"".join(kv_of(b"", p) for p in range(first_position, first_position + count))

    async def unpack(first_position: int, count: int, payload: memoryview) -> None:
        out.append(bytes(payload))

    await probe_self(staging, name, ME, LAYOUT, count, pack, unpack)
    return b"".join(out)


@pytest.mark.parametrize("name", ["loopback", "nixl"])
async def test_a_kv_chunk_comes_back_from_our_own_ring(name: str) -> None:
    async with opened("auto") as staging:
        for count in (1, POSITIONS_PER_BUFFER, 7):
            expected = b"".join(kv_of(b"", position) for position in range(count))
            assert await probe_over(staging, name, count) == expected


@pytest.mark.parametrize(("byte", "told"), [(20, "header"), (300, "digest")])
async def test_other_bytes_are_told(monkeypatch: pytest.MonkeyPatch, byte: int, told: str) -> None:
    read = TransferReader.read

    async def read_corrupted(
        self: TransferReader, peer: str, remote_buffer: int, *rest: object
    ) -> None:
        staging.ring.view(remote_buffer)[byte] ^= 1
        await read(self, peer, remote_buffer, *rest)  # type: ignore[arg-type]

    async with opened("loopback") as staging:
        monkeypatch.setattr(TransferReader, "read", read_corrupted)
        with pytest.raises(Unavailable, match=told):
            await probe_over(staging, "loopback")


async def test_a_read_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: TransferReader, *_: object) -> None:
        raise TransportError("the read failed")

    async with opened("loopback") as staging:
        monkeypatch.setattr(TransferReader, "read", fail)
        with pytest.raises(Unavailable, match="the read failed"):
            await probe_over(staging, "loopback")


async def test_a_ring_without_free_buffers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batonlm.worker.self_test.READ_S", 0.05)
    async with opened("loopback") as staging:
        buffer = staging.ring.take("peer")
        assert buffer is not None
        with pytest.raises(Unavailable, match="too long"):
            await probe_over(staging, "loopback")
        buffer.release()


async def test_a_transport_can_be_done_without_unless_it_was_named() -> None:
    async with opened("auto") as staging:
        await staging.give_up("nixl", "a reason")
        assert staging.names == ("loopback",)
        with pytest.raises(Unavailable, match="loopback does not work here: a reason"):
            await staging.give_up("loopback", "a reason")
    async with opened("nixl") as staging:
        with pytest.raises(Unavailable, match="nixl"):
            await staging.give_up("nixl", "a reason")


async def test_probing_oneself_leaves_peers_readable() -> None:
    """A second agent still reads our ring after we have read it ourselves."""
    other = identity("prefill")
    async with opened("nixl") as staging:
        theirs = await Staging.open(
            other.instance_id, transport="nixl", num_buffers=2, buffer_bytes=BUFFER_BYTES
        )
        try:
            await probe_over(staging, "nixl")
            staging.ring.view(1)[:4] = b"here"
            reader, buffer = theirs.readers["nixl"], theirs.ring.take("peer")
            assert buffer is not None
            metadata = staging.readers["nixl"].metadata
            await reader.add_peer(ME.instance_id, metadata, staging.ring.describe())
            await reader.read(ME.instance_id, 1, buffer, 4, 20)
            await probe_over(staging, "nixl")
            assert bytes(buffer.view[:4]) == b"here"
            buffer.release()
        finally:
            await theirs.close()
