"""One connection: whom it trusts, and answers that are none."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme

from baton_loadtest.drive import HttpConnection
from batonlm.cli.http_client import ConnectionLost, Unreachable, trust
from batonlm.core.errors import InvalidArgument

REQUEST = b"GET / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CA = trustme.CA()


@asynccontextmanager
async def answering(*answers: bytes, tls: bool = False) -> AsyncIterator[int]:
    """A server that says these, one after the other, and then ends the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    context = None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        CA.issue_cert("127.0.0.1").configure_cert(context)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def asked(
    port: int, trusted: ssl.SSLContext | None = None
) -> tuple[int, bytes, HttpConnection]:
    parts: list[bytes] = []
    connection = await HttpConnection.open("127.0.0.1", port, trusted)
    async with asyncio.timeout(120):
        head = await connection.ask(REQUEST, parts.append)
    return head.status, b"".join(parts), connection


async def test_one_answer_after_the_other() -> None:
    async with answering(OK, OK) as port:
        status, body, connection = await asked(port)
        assert (status, body, connection.usable) == (200, b"hi", True)
        async with asyncio.timeout(120):
            head = await connection.ask(REQUEST, lambda part: None)
        assert head.status == 200 and head.headers == {"content-length": "2"}
        connection.close()
        assert not connection.usable
        with pytest.raises(ConnectionLost):
            await connection.ask(REQUEST, lambda part: None)


async def test_over_tls_to_whom_is_trusted() -> None:
    async with answering(OK, tls=True) as port:
        status, body, connection = await asked(port, trust(CA.cert_pem.bytes()))
        connection.close()
        assert (status, body) == (200, b"hi")
        with pytest.raises(InvalidArgument) as caught:
            await asked(port, trust(trustme.CA().cert_pem.bytes()))
        assert caught.value.field == "ca"


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (b"", False),
        (b"nonsense\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", True),
    ],
)
async def test_an_answer_that_does_not_end(answer: bytes, heard: bool) -> None:
    async with answering(answer) as port:
        connection = await HttpConnection.open("127.0.0.1", port)
        with pytest.raises(ConnectionLost):
            async with asyncio.timeout(120):
                await connection.ask(REQUEST, lambda part: None)
        assert connection.answered is heard and not connection.usable


async def test_a_body_of_another_status_is_not_heard() -> None:
    async with answering(OK.replace(b"200 OK", b"404 No")) as port:
        status, body, connection = await asked(port)
        assert (status, body, connection.usable) == (404, b"", True)
        connection.close()


async def test_nobody_listens() -> None:
    async with answering() as port:
        pass
    with pytest.raises(Unreachable):
        await HttpConnection.open("127.0.0.1", port)
