"""Answers POST of a generating route: parse, open, then one document or a stream of events.

Raw ASGI: nothing stands between an event and the socket. Knows neither API's words; those are the
`parse` and the `answer` it is given.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from baton.core.errors import BatonError, Internal
from baton.core.request import Accepted, Delta, Finished, Request
from baton.router.http.answer import Answer
from baton.router.http.body import ClientGone, read_json_body
from baton.router.http.collect import Collector
from baton.router.http.door import caller
from baton.router.http.errors import described
from baton.router.http.frontend import EventStream, Frontend
from baton.router.http.parse import Call
from baton.router.http.respond import Header, Json, send_json
from baton.router.http.sse import EventWriter
from baton.router.http.tasks import in_parallel, while_connected
from baton.router.http.usage import Usage

log = logging.getLogger(__name__)

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_LISTED = 32


@dataclass(frozen=True, slots=True)
class Generation:
    """An ASGI app. Raises BatonError or HttpError only while nothing has been sent."""

    frontend: Frontend
    parse: Callable[[bytes], Call]
    answer: Callable[[Call, Sequence[Accepted], int], Answer]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_json_body(scope, receive)
        except ClientGone:
            return
        call = self.parse(body).of(caller(scope))
        try:
            await while_connected(receive, self._respond(call, send))
        except BatonError as error:
            raise call.in_client_words(error) from error

    async def _respond(self, call: Call, send: Send) -> None:
        async with _opened(self.frontend, call.requests) as streams:
            accepted = [first for first, _ in streams]
            answer = self.answer(call, accepted, int(time.time()))
            headers = _headers(call, accepted[0])
            usage = Usage(accepted)
            events = [stream for _, stream in streams]
            if call.stream:
                writer = EventWriter(send)
                await writer.start(headers)
                await writer.end(await _stream(call, events, answer, usage, writer))
            else:
                whole = [Collector(call.n) for _ in events]
                await in_parallel(
                    *(c.collect(stream, usage) for c, stream in zip(whole, events, strict=True))
                )
                document = answer.document([c.choices() for c in whole], usage.total())
                await send_json(send, 200, document, headers)


async def _stream(
    call: Call,
    streams: Sequence[EventStream],
    answer: Answer,
    usage: Usage,
    writer: EventWriter,
) -> Json | None:
    """Writes all events but the end; returns the error to end with, if there is one."""

    async def pump(prompt: int, stream: EventStream) -> None:
        await writer.write(with_usage(answer.opening(prompt)))
        async for event in stream:
            if isinstance(event, (Delta, Finished)):
                usage.add(event)
            if isinstance(event, Delta):
                await writer.write(with_usage(answer.chunks(prompt, event)))

    def with_usage(chunks: list[Json]) -> list[Json]:
        if call.continuous_usage:
            return [chunk | {"usage": usage.so_far()} for chunk in chunks]
        if call.include_usage:
            return [chunk | {"usage": None} for chunk in chunks]
        return chunks

    try:
        async with writer.kept_alive():
            await in_parallel(*(pump(i, stream) for i, stream in enumerate(streams)))
        if call.include_usage:
            await writer.write([answer.chunk([]) | {"usage": usage.total()}])
    except BatonError as error:
        return described(call.in_client_words(error))[1]
    except Exception:
        log.exception("stream %s failed", answer.id)
        return described(Internal("internal error"))[1]
    return None


@asynccontextmanager
async def _opened(
    frontend: Frontend, requests: Sequence[Request]
) -> AsyncIterator[list[tuple[Accepted, EventStream]]]:
    """All requests accepted, in order, with what follows; or none of them and the first failure.

    On leaving, whichever way, every stream is closed.
    """
    found: dict[int, tuple[Accepted, EventStream]] = {}
    async with AsyncExitStack() as closing:

        async def open_one(position: int, request: Request) -> None:
            stream = await frontend.open(request)
            closing.push_async_callback(stream.aclose)
            first = await anext(stream)
            if not isinstance(first, Accepted):
                raise Internal("internal error")
            found[position] = first, stream

        await in_parallel(*(open_one(i, request) for i, request in enumerate(requests)))
        yield [found[i] for i in range(len(requests))]


def _headers(call: Call, accepted: Accepted) -> list[Header]:
    """x-baton-seed: sending it as `seed` gives the same answer again."""
    headers = [
        (b"x-request-id", accepted.request_id.encode()),
        (b"x-baton-seed", b"%d" % accepted.seed),
    ]
    if call.ignored:
        headers.append((b"x-baton-ignored-params", _listed(call.ignored)))
    return headers


def _listed(names: Sequence[str]) -> bytes:
    """Names are the client's: only plain ones, and a bounded number, go into a header."""
    plain = [name for name in names if _PLAIN.fullmatch(name)][:_MAX_LISTED]
    rest = len(names) - len(plain)
    return ", ".join([*plain, *([f"and {rest} more"] if rest else [])]).encode()
