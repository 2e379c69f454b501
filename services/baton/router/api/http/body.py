"""Receiving a JSON body: its declared type, a bound on its size, and room for it.

Nothing of a body is read before there is room for it. A refused body is still read, up to a bound,
and not kept: closing a socket with unread data resets it, and the client would see a broken
connection in place of the reason. All refused bodies together are read no faster than
DISCARDED_BYTES_PER_S, so that clients which repeat themselves are slowed down, and this router is
not. A body that comes too slowly ends its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from baton.core.admission.admission import Holding
from baton.core.errors import BatonError
from baton.router.api.http.access import caller
from baton.router.api.http.responses import HttpError
from baton.router.request.pipeline import Pipeline

MAX_BODY_BYTES = 1 << 20
MAX_DISCARDED_BYTES = 8 << 20

DISCARDED_BYTES_PER_S = 16 << 20
AT_ONCE_BYTES = 1 << 20
"""How much may be discarded faster, after a while without."""


class ClientGone(Exception):
    """The client left before its request was complete: there is no one to answer."""


@dataclass(slots=True)
class Body:
    """All of a request's body."""

    raw: bytes
    """Its user empties it when it is parsed."""
    holding: Holding
    """The room for it."""


class Bodies:
    """Receives the bodies of all requests of one application."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._discarded_until = 0.0
        """When the limit of speed allows the next byte, on the loop's clock."""

    @asynccontextmanager
    async def received(self, scope: Scope, receive: Receive) -> AsyncIterator[Body]:
        """The whole body; its room is given back on leaving. Raises HttpError 413 or 415,
        ClientGone, or BatonError when there is no room for it."""
        tenant = caller(scope)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            with self._pipeline.reading(tenant):
                _check(headers)
            holding = self._pipeline.receive(tenant, int(headers.get(b"content-length", b"0")))
        except (BatonError, HttpError):
            await self.discard(scope, receive)
            raise
        try:
            with self._pipeline.reading(tenant):
                body = Body(
                    await self._all(receive, holding, b"content-length" in headers), holding
                )
            yield body
        finally:
            holding.release()

    async def discard(self, scope: Scope, receive: Receive) -> None:
        """Takes the body of a request that is refused anyway. Raises ClientGone."""
        # A client that waits for "100 Continue" has not sent the body; do not invite it.
        if dict(scope["headers"]).get(b"expect", b"").lower() != b"100-continue":
            await self._rest(receive, 0)

    async def _all(self, receive: Receive, holding: Holding, declared: bool) -> bytes:
        """declared: there is room for all of it; else for each part as it comes."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            more = message.get("more_body", False)
            try:
                if len(body) + len(part) > MAX_BODY_BYTES:
                    raise _too_large()
                if not declared:
                    holding.grow(len(part))
            except (BatonError, HttpError):
                received = len(body) + len(part)
                body.clear()
                if more:
                    await self._rest(receive, received)
                raise
            body += part
        return bytes(body)

    async def _rest(self, receive: Receive, received: int) -> None:
        """Takes what still comes of a body, and keeps nothing."""
        loop = asyncio.get_running_loop()
        more = True
        while more and received <= MAX_DISCARDED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size = len(message.get("body", b""))
            received += size
            more = message.get("more_body", False)
            now = loop.time()
            self._discarded_until = max(self._discarded_until, now) + size / DISCARDED_BYTES_PER_S
            early_s = self._discarded_until - now - AT_ONCE_BYTES / DISCARDED_BYTES_PER_S
            if early_s > 0:
                await asyncio.sleep(early_s)


def _check(headers: dict[bytes, bytes]) -> None:
    """What the headers alone rule out. No declared type passes for JSON, a wrong one does not.

    A page of another site can make a browser send a body of no type at once. A body of type JSON
    the browser sends only after a CORS preflight, which this router never allows. So a body from a
    browser has to be of type JSON.
    """
    undeclared = b"" if _from_a_page(headers) else b"application/json"
    kind = headers.get(b"content-type", undeclared).split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise HttpError(415, "Content-Type must be application/json", code="unsupported_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise HttpError(415, "the body must not be compressed", code="unsupported_encoding")
    if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
        raise _too_large()


def _from_a_page(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser sends it, for a page of whatever site."""
    return b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none"


def _too_large() -> HttpError:
    return HttpError(413, f"the body must have at most {MAX_BODY_BYTES} bytes", code="too_large")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, or cancels it and waits for it as soon as the client is gone.

    The body must have been received before: from then on `receive` only speaks of the end.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
