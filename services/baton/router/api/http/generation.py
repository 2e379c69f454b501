"""Answers POST of a generating route: parse, open, then one document or a stream of events.

Raw ASGI: nothing stands between an event and the socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from starlette.types import Receive, Scope, Send

from baton.core.admission.admission import Holding
from baton.core.errors import BatonError, Internal
from baton.core.observe.stages import TraceContext
from baton.core.request.request import Accepted, Delta, Finished, Request
from baton.router.api.http.access import caller
from baton.router.api.http.answers import (
    Answer,
    Usage,
    joined,
    timings_asked_for,
    timings_described,
    timings_headers,
)
from baton.router.api.http.body import Bodies, while_connected
from baton.router.api.http.parse import Call, listed, most_urgent
from baton.router.api.http.responses import Header, Json, described, encode, encode_text, send_json
from baton.router.request.pipeline import EmptyStream, EventStream, Pipeline, left
from baton.rpc.logs import named
from baton.rpc.tracing import context_of

Events = EventStream | EmptyStream

# Chunks that say nothing but text, put together from bytes: nearly all of a stream are such.

_MARK = "\ue000text\ue001"

_told = attrgetter(
    *(f.name for f in fields(Delta) if f.name not in ("choice", "text", "token_ids"))
)
_NOTHING = _told(Delta(0))
"""Whatever a delta may say besides its text, unsaid."""


class PlainChunks:
    """Of one prompt's choices. words: the chunks of a delta as they are sent; of one that is only
    text there is one, and always the same but for the text.
    """

    def __init__(self, words: Callable[[Delta], list[Json]]) -> None:
        self._words = words
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, delta: Delta) -> bytes | None:
        """The whole event, or None when the delta says more than text, or no text."""
        if not delta.text or _told(delta) != _NOTHING:
            return None
        around = self._around.get(delta.choice)
        if around is None:
            around = self._around[delta.choice] = self._ask(delta)
        return around[0] + encode_text(delta.text) + around[1]

    def _ask(self, delta: Delta) -> tuple[bytes, bytes]:
        (chunk,) = self._words(replace(delta, text=_MARK))
        head, _, tail = encode(chunk).partition(encode_text(_MARK))
        return b"data: " + head, tail + b"\n\n"


# Adds up one prompt's events until all its choices are whole, for an answer in one document.


class WholeAnswer:
    """Keeps what came of each choice; joins it once, at the end."""

    def __init__(self, n: int):
        self._parts: list[list[Delta]] = [[] for _ in range(n)]
        self.finished: list[Finished] = []
        """One, at the end."""

    async def collect(self, stream: Events, usage: Usage) -> None:
        async for event in stream:
            if isinstance(event, Delta):
                usage.add(event)
                self._parts[event.choice].append(event)
            elif isinstance(event, Finished):
                usage.add(event)
                self.finished.append(event)

    def choices(self) -> list[Delta]:
        return [_joined(choice, parts) for choice, parts in enumerate(self._parts)]


def _joined(choice: int, parts: list[Delta]) -> Delta:
    """One Delta that says all; how it ended is in the last part."""
    last = parts[-1] if parts else Delta(choice)
    return replace(
        last,
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=joined(parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """An ASGI app. Raises BatonError or HttpError only while nothing has been sent."""

    pipeline: Pipeline
    bodies: Bodies
    parse: Callable[[bytes], Call]
    answer: Callable[[Call, Sequence[Accepted], int], Answer]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        async with self.bodies.received(scope, receive) as body:
            self.pipeline.turn_away(tenant, most_urgent(body.raw, tenant))
            with self.pipeline.reading(tenant):
                call = self.parse(body.raw).of(tenant, _trace(scope))
            body.raw = b""
            writer = EventWriter(send)
            try:
                asked = timings_asked_for(dict(scope["headers"]))
                responding = self._respond(call, body.holding, asked, send, writer)
                await while_connected(receive, responding)
            except asyncio.CancelledError:
                # The server closes; what the request held has been given back.
                await writer.break_off(described(left())[1])
                raise
            except BatonError as error:
                raise call.in_client_words(error) from error

    async def _respond(
        self, call: Call, holding: Holding, wants_timings: bool, send: Send, writer: EventWriter
    ) -> None:
        async with _opened(self.pipeline, call.requests, holding) as streams:
            accepted = [first for first, _ in streams]
            answer = self.answer(call, accepted, int(time.time()))
            headers = _headers(call, accepted[0])
            usage = Usage(accepted)
            events = [stream for _, stream in streams]
            if call.stream:
                await writer.start(headers)
                about = named(accepted[0].request_id, accepted[0].trace_id)
                await writer.end(
                    await _stream(call, events, answer, usage, writer, wants_timings, about)
                )
            else:
                whole = [WholeAnswer(call.n) for _ in events]
                await in_parallel(
                    *(c.collect(stream, usage) for c, stream in zip(whole, events, strict=True))
                )
                document = answer.document([c.choices() for c in whole], usage.total())
                if wants_timings:
                    finished = [end for collector in whole for end in collector.finished]
                    document |= answer.timings(timings_described(finished))
                    headers += timings_headers(finished)
                await send_json(send, 200, document, headers)


async def _stream(
    call: Call,
    streams: Sequence[Events],
    answer: Answer,
    usage: Usage,
    writer: EventWriter,
    wants_timings: bool,
    about: Mapping[str, str],
) -> Json | None:
    """Writes all events but the end; returns the error to end with, if there is one. about: its
    first prompt's request, for log lines."""
    finished: dict[int, Finished] = {}

    async def pump(prompt: int, stream: Events) -> None:
        await writer.write(with_usage(answer.opening(prompt)))
        plain = PlainChunks(lambda delta: with_usage(answer.chunks(prompt, delta)))
        only_text = not (call.wants_token_ids or call.wants_logprobs or call.continuous_usage)
        async for event in stream:
            if isinstance(event, Delta):
                usage.add(event)
                known = plain.event(event) if only_text else None
                if known is not None:
                    await writer.write_events(known)
                else:
                    await writer.write(with_usage(answer.chunks(prompt, event)))
            elif isinstance(event, Finished):
                usage.add(event)
                finished[prompt] = event

    def with_usage(chunks: list[Json]) -> list[Json]:
        if call.continuous_usage:
            return [chunk | {"usage": usage.so_far()} for chunk in chunks]
        if call.include_usage:
            return [chunk | {"usage": None} for chunk in chunks]
        return chunks

    try:
        async with writer.kept_alive():
            await in_parallel(*(pump(i, stream) for i, stream in enumerate(streams)))
        last: Json = {"usage": usage.total()} if call.include_usage else {}
        if wants_timings:
            last |= answer.timings(timings_described([end for _, end in sorted(finished.items())]))
        if last:
            await writer.write([answer.chunk([]) | last])
    except BatonError as error:
        return described(call.in_client_words(error))[1]
    except Exception:
        log.exception("a stream failed", extra=about)
        return described(Internal("internal error"))[1]
    return None


@asynccontextmanager
async def _opened(
    pipeline: Pipeline, requests: Sequence[Request], holding: Holding
) -> AsyncIterator[list[tuple[Accepted, Events]]]:
    """All requests accepted, in order, with what follows; or none of them and the first failure.

    On leaving, whichever way, every stream is closed.
    """
    found: dict[int, tuple[Accepted, Events]] = {}
    async with AsyncExitStack() as closing:
        # Each prompt gives its part back when it is encoded, and what is left goes here.
        parts = holding.divided(len(requests))
        for part in parts:
            closing.callback(part.release)

        async def open_one(position: int, request: Request) -> None:
            stream = await pipeline.open(request, parts[position])
            closing.push_async_callback(stream.aclose)
            first = await anext(stream)
            if not isinstance(first, Accepted):
                raise Internal("internal error")
            found[position] = first, stream

        await in_parallel(*(open_one(i, request) for i, request in enumerate(requests)))
        yield [found[i] for i in range(len(requests))]


def _trace(scope: Scope) -> TraceContext:
    """Where in its caller's trace a request belongs. ASGI has the names in lower case."""
    return context_of(
        (name.decode("latin-1"), value)
        for name, value in scope["headers"]
        if name.startswith(b"trace")
    )


def _headers(call: Call, accepted: Accepted) -> list[Header]:
    """x-request-id: the client's own, if it sent one; logs and answers always have ours, which is
    x-baton-request-id then. x-baton-seed: sending it as `seed` gives the same answer again."""
    headers = [
        (b"x-request-id", (call.request_id or accepted.request_id).encode()),
        (b"x-baton-seed", b"%d" % accepted.seed),
    ]
    if call.request_id:
        headers.append((b"x-baton-request-id", accepted.request_id.encode()))
    if call.ignored:
        headers.append((b"x-baton-ignored-params", listed(call.ignored)))
    return headers


KEEP_ALIVE_S = 10.0
FAREWELL_S = 0.5
"""What a client gets to take the last event when the server closes."""

log = logging.getLogger(__name__)

_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold back events until its buffer is full.
    (b"x-accel-buffering", b"no"),
)


class EventWriter:
    """Writes one stream. Each `send` carries whole events, so several tasks may write.

    `send` waits while the client reads slowly; what is new meanwhile is coalesced at the source.
    """

    def __init__(self, send: Send):
        self._send = send
        self._idle = True
        self._open = False

    async def start(self, headers: Sequence[Header]) -> None:
        head = [*_HEAD, *headers]
        self._open = True
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, documents: Iterable[Json]) -> None:
        if events := b"".join(b"data: %b\n\n" % encode(each) for each in documents):
            await self.write_events(events)

    async def write_events(self, events: bytes) -> None:
        """Whole events, framed."""
        self._idle = False
        await self._body(events)

    async def end(self, last: Json | None = None) -> None:
        """Ends the stream: with [DONE], or with an error document in its place."""
        data = b"[DONE]" if last is None else encode(last)
        event = b"data: %b\n\n" % data
        self._open = False
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def break_off(self, error: Json) -> None:
        """Ends a stream that has begun and has no end yet, with an error. Bounded, and without
        effect where nobody takes it."""
        if not self._open:
            return
        with suppress(Exception):
            async with asyncio.timeout(FAREWELL_S):
                await self.end(error)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Within, a comment goes out whenever nothing did for KEEP_ALIVE_S."""
        ticker = asyncio.ensure_future(self._tick())
        try:
            yield
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._idle:
                await self._body(b": keep-alive\n\n")
            self._idle = True

    async def _body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def in_parallel(*work: Coroutine[Any, Any, None]) -> None:
    """All at once. The first failure cancels the others and is raised as itself."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
