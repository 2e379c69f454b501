"""A router that is slow to greet, as one on a node short of processors is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from batonlm.client import AsyncClient, Retries

GREETING_S = 1.5


@pytest.fixture
async def slow(address: str) -> AsyncIterator[str]:
    """Where the router can be had, GREETING_S after one connected."""
    host, _, port = address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(GREETING_S)
        there_reader, there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, there), pipe(there_reader, writer))

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.deep
async def test_a_call_waits_for_a_greeting(slow: str) -> None:
    async with AsyncClient(slow, retries=Retries(most=0)) as client:
        answer = await client.chat("hello").read()
        assert answer.text
