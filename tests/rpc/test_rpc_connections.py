"""What a public gRPC port bears of connections that bring no work, on raw sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batonlm.rpc.channels import Channels
from batonlm.rpc.server import ProcessServer, PublicLimits
from tests.rpc.echo import Echo, call, stream

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""HTTP/2's preface and empty settings: a client that then asks nothing."""

GOAWAY = 7
WITHIN_S = 120.0


@asynccontextmanager
async def serving(limits: PublicLimits) -> AsyncIterator[str]:
    server = ProcessServer(
        listen="127.0.0.1:0", services=[Echo().service()], public=True, limits=limits
    )
    try:
        yield await server.start()
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def frames(reader: asyncio.StreamReader) -> list[int]:
    """The kinds of all frames until the connection ends, which it must."""
    found: list[int] = []
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                found.append(head[3])
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    return found


@pytest.mark.parametrize("said", [b"", GREETING[:10], b"GET / HTTP/1.1\r\n"])
async def test_who_does_not_greet_is_cut(said: bytes) -> None:
    async with (
        serving(PublicLimits(handshake_s=0.2)) as address,
        connected(address) as (reader, writer),
    ):
        writer.write(said)
        await frames(reader)


async def test_who_asks_nothing_is_sent_away() -> None:
    async with (
        serving(PublicLimits(idle_s=0.2)) as address,
        connected(address) as (reader, writer),
    ):
        writer.write(GREETING)
        assert GOAWAY in await frames(reader)


async def test_connections_are_bounded() -> None:
    async with (
        serving(PublicLimits(max_connections=1)) as address,
        connected(address) as (first, first_writer),
    ):
        first_writer.write(GREETING)
        assert await asyncio.wait_for(first.readexactly(9), WITHIN_S)
        async with connected(address) as (second, second_writer):
            second_writer.write(GREETING)
            assert await frames(second) == []


async def test_an_old_connection_ends_its_calls_well() -> None:
    """The stream that runs on it is not touched; the next call goes over another one."""
    channels = Channels()
    try:
        async with serving(PublicLimits(max_age_s=0.2)) as address:
            running = stream(channels.get(address))(b"wait")
            assert await running.read() == b"wait"
            for _ in range(30):
                assert await call(channels.get(address), "unary", b"next") == [b"next"]
                await asyncio.sleep(0.02)
            assert not running.done()
            running.cancel()
    finally:
        await channels.close()
