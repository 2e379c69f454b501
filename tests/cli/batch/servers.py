"""A server on a real socket that answers as it is told, for clients of a batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from batonlm.cli.access import Access

Say = Callable[[int, dict[str, Any]], bytes]
"""From the request's number, from 0, and its body to the bytes of the answer."""

CUT = b"CUT"
"""At the end of an answer: the connection ends there."""


def answer(status: int, said: object, *headers: str) -> bytes:
    body = json.dumps(said).encode()
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def serving(say: Say, most: list[int] | None = None, port: int = 0) -> AsyncIterator[Access]:
    """most: its only item becomes how many were being answered at once. port: see `claimed`; 0: a
    free one."""
    number = out = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number, out
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                body = json.loads(await reader.readexactly(size))
                mine, number, out = number, number + 1, out + 1
                if most is not None:
                    most[0] = max(most[0], out)
                await asyncio.sleep(0)
                said = say(mine, body)
                out -= 1
                writer.write(said.removesuffix(CUT))
                if said.endswith(CUT):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, reuse_port=bool(port))
    host, bound = server.sockets[0].getsockname()
    try:
        yield Access(f"{host}:{bound}")
    finally:
        server.close()
        await server.wait_closed()
