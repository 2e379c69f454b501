"""What a public port bears: slow requests, slow readers, many connections, old ones."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batonlm.router.api.http.connections import HttpLimits
from batonlm.router.api.http.server import HttpServer
from tests.services.router_http.scripted import Scripted
from tests.services.router_http.test_server import connected, post, serving

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SMALL = {"messages": [{"role": "user", "content": "hello"}]}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LAST_CHUNK = b"\r\n0\r\n\r\n"
LARGE = {"prompt": "x" * 4_000, "max_tokens": 5_000, "n": 16, "stream": True}
"""Its answer is larger than what the sockets between us hold."""
TRIES = 3
"""A machine that is busy elsewhere may let a client take nothing for too long."""


async def answer(reader: asyncio.StreamReader) -> bytes:
    """All until the connection ends."""
    return await asyncio.wait_for(reader.read(), 120)


async def head(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)


async def test_a_body_that_does_not_end_is_cut() -> None:
    frontend = Scripted()
    async with (
        serving(frontend, HttpLimits(body_start_s=0.05)) as server,
        connected(server) as (reader, writer),
    ):
        writer.write(post(json.dumps(SMALL).encode())[:-10])
        said = await answer(reader)
    assert said.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in said
    assert frontend.seen == []


async def test_a_body_may_be_as_slow_as_the_least_speed() -> None:
    """It comes in twenty pieces, each within what the pieces before it have earned."""
    limits = HttpLimits(body_start_s=0.5, body_bytes_per_s=10)
    async with serving(Scripted(), limits) as server, connected(server) as (reader, writer):
        data = post(json.dumps(SMALL | {"user": "x" * 2000}).encode())
        for start in range(0, len(data), 120):
            writer.write(data[start : start + 120])
            await asyncio.sleep(0.05)
        assert (await head(reader)).startswith(b"HTTP/1.1 200 ")


async def test_no_body_may_take_longer_than_the_longest_time() -> None:
    limits = HttpLimits(body_timeout_s=0.2, body_bytes_per_s=1)
    async with serving(Scripted(), limits) as server, connected(server) as (reader, writer):
        writer.write(post(b"x" * 500)[:-400])
        assert (await answer(reader)).startswith(b"HTTP/1.1 408 ")


async def test_connections_of_one_address_are_bounded() -> None:
    async with (
        serving(Scripted(), HttpLimits(max_per_address=1)) as server,
        connected(server) as (first, first_writer),
    ):
        first_writer.write(HEALTH)
        assert (await head(first)).startswith(b"HTTP/1.1 200 ")
        async with connected(server) as (second, second_writer):
            second_writer.write(HEALTH)
            said = await answer(second)
            assert said.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1\r\n" in said
        async with connected(server) as (third, third_writer):
            third_writer.write(HEALTH.replace(b"/health", b"/api/tags"))
            assert (await answer(third)).endswith(
                b'{"error":"too many connections from this address"}'
            )
        host, port = server.address.rsplit(":", 1)
        reader, other = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
        other.write(HEALTH)
        assert (await head(reader)).startswith(b"HTTP/1.1 200 ")
        other.close()
        await other.wait_closed()


async def test_room_is_given_back() -> None:
    async with serving(Scripted(), HttpLimits(max_per_address=1)) as server:
        for _ in range(3):
            async with connected(server) as (reader, writer):
                writer.write(HEALTH)
                assert (await head(reader)).startswith(b"HTTP/1.1 200 ")
            while server.num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_an_old_connection_ends_with_the_answer_it_is_at() -> None:
    async with (
        serving(Scripted(), HttpLimits(max_age_s=0.001)) as server,
        connected(server) as (reader, writer),
    ):
        said = b""
        while b"connection: close" not in said:
            writer.write(HEALTH)
            said = await head(reader)
        assert await answer(reader) == b""


@asynccontextmanager
async def leaving(
    frontend: Scripted,
) -> AsyncIterator[tuple[HttpServer, Connection, Connection]]:
    """A server that leaves, a connection that has had an answer and one whose answer has begun."""
    async with (
        serving(frontend, HttpLimits()) as server,
        connected(server) as idle,
        connected(server) as busy,
    ):
        idle[1].write(HEALTH)
        assert b"close" not in await head(idle[0])
        busy[1].write(post(json.dumps({**SMALL, "stream": True}).encode()))
        await asyncio.wait_for(frontend.started.wait(), 120)
        server.leave()
        yield server, idle, busy


async def test_while_it_leaves_every_answer_is_the_last_of_its_connection() -> None:
    frontend = Scripted(hold=True)
    async with leaving(frontend) as (_, idle, busy):
        frontend.release.set()
        # It did not say when it began that it would be the last, so another request may come.
        assert (await busy[0].readuntil(LAST_CHUNK)).endswith(LAST_CHUNK)
        for reader, writer in (busy, idle):
            writer.write(HEALTH)
            assert b"connection: close" in await answer(reader)


async def test_when_nobody_waits_for_them_any_more_connections_end() -> None:
    """Idle ones at once, the others with the answer they are at."""
    frontend = Scripted(hold=True)
    async with leaving(frontend) as (server, (idle, _), (busy, _)):
        server.end_idle()
        assert await answer(idle) == b""
        frontend.release.set()
        assert (await answer(busy)).endswith(b"data: [DONE]\n\n" + LAST_CHUNK)


@asynccontextmanager
async def stalled(server: HttpServer) -> AsyncIterator[socket.socket]:
    """A client with little room that has asked for a large answer and reads nothing by itself."""
    host, port = server.address.rsplit(":", 1)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        data = json.dumps(LARGE).encode()
        start = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        await loop.sock_sendall(client, start.encode() + data)
        yield client


@pytest.mark.deep
async def test_a_client_that_takes_little_is_not_cut() -> None:
    """It reads a little, again and again, for several times as long as it may take nothing."""
    for _ in range(TRIES):
        frontend = Scripted()
        limits = HttpLimits(stall_timeout_s=0.5)
        async with serving(frontend, limits) as server, stalled(server) as client:
            until, received = time.monotonic() + 2.0, b"x"
            while received and time.monotonic() < until:
                try:
                    received = await asyncio.get_running_loop().sock_recv(client, 4096)
                except ConnectionError:
                    received = b""
                await asyncio.sleep(0.01)
            uncut = received and frontend.open_streams == 1
            await asyncio.wait_for(frontend.closed.wait(), 120)
        assert frontend.open_streams == 0
        if uncut:
            return
    raise AssertionError("it is cut every time")


async def test_what_is_only_in_our_buffers_is_not_taken() -> None:
    """The whole answer fits into the socket's own buffer, and still nobody takes it."""
    frontend = Scripted()
    limits = HttpLimits(stall_timeout_s=0.4, keep_alive_s=600)
    small = {**LARGE, "n": 1, "max_tokens": 400}
    async with serving(frontend, limits) as server:
        host, port = server.address.rsplit(":", 1)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            data = json.dumps(small).encode()
            start = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            start += f"content-length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(client, start.encode() + data)
            await asyncio.wait_for(frontend.closed.wait(), 120)
            async with asyncio.timeout(120):
                while server.num_connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                # By a reset: else the kernel would keep the answer for as long as the client lives,
                # and give it to one that reads now.
                with pytest.raises(ConnectionError):
                    while b"[DONE]" not in await loop.sock_recv(client, 1 << 20):
                        pass
