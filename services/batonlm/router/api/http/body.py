"""Receives a JSON body: checks its content type, bounds its size, and reserves room for it.

A body is read only after room for it is reserved. A refused body is still read, up to a bound, and
discarded: closing a socket with unread data resets the connection, and the client would not see the
error. All refused bodies together are read at most at DISCARDED_BYTES_PER_S, which slows down
clients that repeat themselves and not this router. A body that arrives too slowly ends its
connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import BatonError
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.responses import HttpError
from batonlm.router.request.pipeline import Pipeline

MAX_BODY_BYTES = 1 << 20
MAX_DISCARDED_BYTES = 8 << 20

DISCARDED_BYTES_PER_S = 16 << 20
AT_ONCE_BYTES = 1 << 20
"""The burst of bytes that may be discarded faster, after a quiet period."""


class ClientGone(Exception):
    """The client left before its request was complete, so no answer is possible."""


@dataclass(slots=True)
class Body:
    """The whole body of a request."""

    raw: bytes
    """The code that parses it clears it."""
    holding: Holding
    """The room that is reserved for it."""


class Bodies:
    """Receives the bodies of all requests of one application."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._discarded_until = 0.0
        """When the rate limit allows the next byte, on the loop's clock."""

    @asynccontextmanager
    async def received(
        self, scope: Scope, receive: Receive, kinds: Collection[bytes] = ()
    ) -> AsyncIterator[Body]:
        """Yields the whole body, and releases its room on exit. kinds: the content types that are
        taken; none: JSON, see `_check`. Raises HttpError 413 or 415, ClientGone, or BatonError when
        there is no room."""
        tenant = caller(scope)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            with self._pipeline.reading(tenant):
                _check(headers, kinds)
            holding = self._pipeline.receive(tenant, int(headers.get(b"content-length", b"0")))
        except (BatonError, HttpError):
            await self.discard(scope, receive)
            raise
        with holding:
            with self._pipeline.reading(tenant):
                raw = await self._all(receive, holding, b"content-length" in headers)
            yield Body(raw, holding)

    async def discard(self, scope: Scope, receive: Receive) -> None:
        """Discards the body of a request that is refused. Raises ClientGone."""
        # A client that waits for "100 Continue" has not sent the body; reading would invite it.
        if dict(scope["headers"]).get(b"expect", b"").lower() != b"100-continue":
            await self._rest(receive, 0)

    async def _all(self, receive: Receive, holding: Holding, declared: bool) -> bytes:
        """Reads the body. declared: room for all of it is reserved; otherwise room is reserved part
        by part."""
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
        """Reads and discards the rest of a body."""
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


def content_type(headers: Mapping[bytes, bytes], default: bytes = b"") -> bytes:
    """Returns the type without its parameters."""
    return headers.get(b"content-type", default).split(b";")[0].strip().lower()


def _check(headers: dict[bytes, bytes], kinds: Collection[bytes]) -> None:
    """Raises HttpError for headers that rule the body out. No content type counts as JSON, where
    that is taken; a wrong one is refused.

    A page of another site can make a browser send a body without a type directly, while a JSON body
    requires a CORS preflight, which is allowed to the pages of --cors-origin only. So a body from a
    browser must have the JSON type, or another that requires one.
    """
    kind = content_type(headers, b"" if from_a_page(headers) else b"application/json")
    fits = kind in kinds if kinds else kind == b"application/json" or kind.endswith(b"+json")
    if not fits:
        wanted = " or ".join(each.decode() for each in kinds) or "application/json"
        raise HttpError(415, f"Content-Type must be {wanted}", code="unsupported_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise HttpError(415, "the body must not be compressed", code="unsupported_encoding")
    if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
        raise _too_large()


def from_a_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser may have sent the request for a web page. Old browsers send forms with
    neither of the two headers that say so; their names all begin alike."""
    return (
        b"origin" in headers
        or headers.get(b"sec-fetch-site", b"none") != b"none"
        or headers.get(b"user-agent", b"").startswith(b"Mozilla/")
    )


def _too_large() -> HttpError:
    return HttpError(413, f"the body must have at most {MAX_BODY_BYTES} bytes", code="too_large")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, or cancels it and waits for it when the client leaves.

    The body must have been received before, so that `receive` reports only the end.
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
