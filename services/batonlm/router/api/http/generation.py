"""Handles POST of a generating route: parse, open, then one document or a stream of events.

It is raw ASGI, without a layer between an event and the socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, Internal, InvalidArgument
from batonlm.core.request.request import Accepted, Delta, Request, join_deltas
from batonlm.core.request.resumption import EventIds, StreamPosition
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.answers import AnswerWriter
from batonlm.router.api.http.body import Bodies, while_connected
from batonlm.router.api.http.parse import (
    LAST_EVENT_ID_HEADER,
    RESUME_HEADER,
    GenerationCall,
    listed,
    most_urgent,
)
from batonlm.router.api.http.responses import (
    OPENAI,
    Header,
    HttpError,
    Json,
    WireFormat,
    encode,
    send_json,
)
from batonlm.router.api.translation import IDEMPOTENCY_KEY, in_client_words
from batonlm.router.request.kept import KeyReused, StillRunning, not_kept
from batonlm.router.request.pipeline import EventStream, Pipeline, left
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import context_of

KEEP_ALIVE_S = 10.0
FAREWELL_S = 0.5
"""Seconds that a client has to read the last event when the server closes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratingRoute:
    """An ASGI app. Raises BatonError or HttpError only before anything is sent."""

    pipeline: Pipeline
    bodies: Bodies
    answer: Callable[[GenerationCall, Sequence[Accepted], int], AnswerWriter]
    wire: WireFormat = OPENAI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        async with self.bodies.received(scope, receive) as body:
            self.pipeline.turn_away(tenant, most_urgent(body.raw, tenant))
            headers = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
            given = dict(headers)
            last_event_id = given.get(LAST_EVENT_ID_HEADER.lower())
            resumes = last_event_id is not None or _says_yes(given.get(RESUME_HEADER))
            key = given.get(IDEMPOTENCY_KEY.lower())
            with self.pipeline.reading(tenant):
                if resumes and not self.wire.resumable:
                    name = RESUME_HEADER if last_event_id is None else LAST_EVENT_ID_HEADER
                    raise InvalidArgument(f"{name} is not supported on this route", field=name)
                call = await self.read(body.raw, tenant, body.holding)
                call = call.of(tenant, context_of(headers))
                if last_event_id is not None:
                    call = call.with_event_ids(last_event_id.decode("latin-1").strip())
                elif call.stream and resumes:
                    call = call.with_event_ids(None)
                if key is not None:
                    call = call.with_idempotency_key(key.decode("latin-1"))
            body.raw = b""
            await self.respond(call, body.holding, given, receive, send)

    async def read(self, raw: bytes, tenant: Tenant, holding: Holding) -> GenerationCall:
        """Returns what a body asks for. holding: the room of its bytes. Raises BatonError."""
        raise NotImplementedError

    async def keep(self, call: GenerationCall, answer: AnswerWriter) -> None:
        """Called with a whole answer, before its end is sent."""

    async def respond(
        self,
        call: GenerationCall,
        holding: Holding,
        given: Mapping[str, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        """Answers a call. given: the headers. Raises as `__call__` does."""
        events = EventWriter(send, self.wire)
        with_timings = _says_yes(given.get("x-baton-timings"))
        try:
            with worded(call):
                work = self._respond(call, holding, send, events, with_timings=with_timings)
                await while_connected(receive, work)
        except asyncio.CancelledError:
            # The server closes; the request's resources are released.
            await events.break_off(left())
            raise

    async def _respond(
        self,
        call: GenerationCall,
        holding: Holding,
        send: Send,
        events: EventWriter,
        *,
        with_timings: bool,
    ) -> None:
        async with _opened(self.pipeline, call.requests, holding, View(self, call)) as opened:
            accepted = [first for first, _ in opened]
            streams = [stream for _, stream in opened]
            created = int(time.time()) if call.resumes is None else call.resumes.created
            answer = self.answer(call, accepted, created)
            headers = _headers(call, accepted[0])
            headers += self.wire.id_headers(call.stream_id(accepted[0]))
            if not call.stream:
                document = answer.document(await _gathered(call, streams, answer))
                await self.keep(call, answer)
                if with_timings:
                    document |= answer.timings()
                    headers += answer.timing_headers()
                await send_json(send, 200, document, headers)
                return
            ids = _event_ids(call, accepted[0], created) if call.resumable else None
            await events.start(headers)
            error: BatonError | None = None
            try:
                async with events.kept_alive():
                    if ids is not None:
                        await _pump_with_ids(ids, streams[0], answer, events)
                    else:
                        pumps = [
                            _pump(prompt, stream, answer, events)
                            for prompt, stream in enumerate(streams)
                        ]
                        await in_parallel(*pumps)
                await self.keep(call, answer)
                last = answer.last_chunk(with_timings=with_timings)
                if ids is None:
                    await events.write(last)
                elif not ids.has_all:
                    await events.write(last, [ids.finished() for _ in last])
            except BatonError as failure:
                error = in_client_words(failure, call.names)
            except Exception:
                about = named(accepted[0].request_id, accepted[0].trace_id)
                log.exception("a stream failed", extra=about)
                error = Internal("internal error")
            if error is not None:
                error.request_id = call.stream_id(accepted[0])
            await events.end(error, answer)


@dataclass(frozen=True, slots=True)
class Generation(GeneratingRoute):
    """A route whose bodies say all that there is to know."""

    parse: Callable[[bytes], GenerationCall] = field(kw_only=True)

    async def read(self, raw: bytes, tenant: Tenant, holding: Holding) -> GenerationCall:
        return self.parse(raw)


@contextmanager
def worded(call: GenerationCall) -> Iterator[None]:
    """Raises the failures of a call as its client is to see them."""
    try:
        yield
    except KeyReused as error:
        raise HttpError(422, error.message, code="idempotency_key_reused", headers=()) from error
    except StillRunning as error:
        code = "idempotency_key_in_use"
        raise HttpError(409, error.message, code=code, headers=()) from error
    except BatonError as error:
        raise in_client_words(error, call.names) from error


async def _gathered(
    call: GenerationCall, streams: Sequence[EventStream], answer: AnswerWriter
) -> list[list[Delta]]:
    """Returns the whole output of every choice, by prompt. Parts are joined once, at the end."""
    parts: list[list[list[Delta]]] = [[[] for _ in range(call.n)] for _ in streams]

    async def gather(prompt: int, stream: EventStream) -> None:
        async for event in stream:
            answer.count(prompt, event)
            if isinstance(event, Delta):
                parts[prompt][event.choice].append(event)

    await in_parallel(*(gather(prompt, stream) for prompt, stream in enumerate(streams)))
    return [
        [join_deltas(choice, deltas) for choice, deltas in enumerate(choices)] for choices in parts
    ]


async def _pump(
    prompt: int, stream: EventStream, answer: AnswerWriter, events: EventWriter
) -> None:
    """Writes all chunks of one prompt."""
    await events.write(answer.with_usage(answer.opening(prompt)))
    plain = PlainChunks(
        lambda delta: answer.with_usage(answer.chunks(prompt, delta)), events.wire.frame
    )
    only_text = answer.has_plain_chunks
    async for event in stream:
        answer.count(prompt, event)
        if isinstance(event, Delta):
            known = plain.event(event) if only_text else None
            if known is not None:
                await events.write_framed(known)
            else:
                await events.write(answer.with_usage(answer.chunks(prompt, event)))


async def _pump_with_ids(
    ids: EventIds, stream: EventStream, answer: AnswerWriter, events: EventWriter
) -> None:
    """Writes the chunks of the only prompt that the client has not, with their ids."""
    opening = answer.with_usage(answer.opening(0))[ids.num_opened :]
    await events.write(opening, [ids.opened() for _ in opening])
    async for event in stream:
        answer.count(0, event)
        if isinstance(event, Delta):
            had, new = ids.split(event)
            # The answer counts what is left out: the offsets of the next tokens depend on it.
            answer.chunks(0, had)
            chunks = answer.with_usage(answer.chunks(0, new))
            await events.write(chunks, ids.of_events(new.choice, len(chunks)))


def _event_ids(call: GenerationCall, accepted: Accepted, created: int) -> EventIds:
    """Raises InvalidArgument."""
    position = call.resumes or StreamPosition(call.stream_id(accepted), created)
    return EventIds(position, call.requests[0].tenant.name, call.n)


def _says_yes(value: bytes | None) -> bool:
    return value is not None and value.strip().lower() in (b"true", b"1")


@dataclass(frozen=True, slots=True)
class View:
    """How a kept stream is shown again: as by the call that began it."""

    route: GeneratingRoute
    call: GenerationCall


@dataclass(frozen=True, slots=True)
class KeptStreamRoute:
    """An ASGI app of a stream that this router runs, or has run a moment ago.

    GET shows it in the form of the call that began it; its events have ids where those of that call
    could have. DELETE says that nobody comes back to it. Raises BatonError or HttpError only before
    anything is sent.
    """

    pipeline: Pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        # Chunks have ids with a prefix, as chatcmpl-ID and cmpl-ID.
        stream_id: str = scope["path_params"]["id"].rpartition("-")[2]
        if scope["method"] == "DELETE":
            with self.pipeline.receive(tenant, 0):
                await self.pipeline.kept.leave(tenant, stream_id)
            await Response(status_code=204)(scope, receive, send)
            return
        given = {name.decode("latin-1"): value for name, value in scope["headers"]}
        last = given.get(LAST_EVENT_ID_HEADER.lower())
        with self.pipeline.receive(tenant, 0) as holding:
            with self.pipeline.reading(tenant):
                kept = self.pipeline.kept.find(tenant, stream_id)
                if kept is None or not isinstance(kept.view, View):
                    raise not_kept(LAST_EVENT_ID_HEADER)
                call = kept.view.call.streamed()
                if kept.view.route.wire.resumable and len(call.requests) == 1:
                    call = call.resuming(StreamPosition(stream_id, kept.created))
                    if last is not None:
                        call = call.with_event_ids(last.decode("latin-1").strip())
                    if call.resumes is None or call.resumes.stream_id != stream_id:
                        text = f"{LAST_EVENT_ID_HEADER} is of another stream"
                        raise InvalidArgument(text, field=LAST_EVENT_ID_HEADER)
                elif last is not None:
                    text = f"{LAST_EVENT_ID_HEADER} is not supported on this stream"
                    raise InvalidArgument(text, field=LAST_EVENT_ID_HEADER)
                ids = [each.stream_id(stream_id) for each in call.requests]
                if any(self.pipeline.kept.find(tenant, each) is None for each in ids):
                    raise not_kept(LAST_EVENT_ID_HEADER)
            await kept.view.route.respond(call, holding, given, receive, send)


@asynccontextmanager
async def _opened(
    pipeline: Pipeline, requests: Sequence[Request], holding: Holding, view: View
) -> AsyncIterator[list[tuple[Accepted, EventStream]]]:
    """Opens all requests; yields their Accepted events and streams in order. If one fails, raises
    the first failure and opens none. Closes every stream on exit."""
    found: dict[int, tuple[Accepted, EventStream]] = {}
    async with AsyncExitStack() as closing:
        # Each prompt releases its part when it is encoded; the rest is released here.
        parts = holding.divided(len(requests))
        for part in parts:
            closing.enter_context(part)

        async def open_one(position: int, request: Request) -> None:
            stream = await pipeline.kept.open(request, parts[position], view)
            closing.push_async_callback(stream.aclose)
            first = await anext(stream)
            if not isinstance(first, Accepted):
                raise Internal("internal error")
            found[position] = first, stream

        await in_parallel(*(open_one(i, request) for i, request in enumerate(requests)))
        yield [found[i] for i in range(len(requests))]


def _headers(call: GenerationCall, accepted: Accepted) -> list[Header]:
    """x-request-id is the client's own id, if it sent one. Logs and answers always have the
    router's, which is then in x-baton-request-id. x-baton-seed: sent as `seed`, it reproduces the
    answer. A stream that continues another one has the other's id in its chunks."""
    shown = call.request_id or call.stream_id(accepted)
    headers = [
        (b"x-request-id", shown.encode()),
        (b"x-baton-seed", b"%d" % accepted.seed),
    ]
    if shown != accepted.request_id:
        headers.append((b"x-baton-request-id", accepted.request_id.encode()))
    if call.ignored:
        headers.append((b"x-baton-ignored-params", listed(call.ignored)))
    return headers


class PlainChunks:
    """Assembles the chunks of one prompt from bytes when they contain only text, as nearly all
    chunks of a stream do."""

    _MARK = "\ue000text\ue001"
    _rest = attrgetter(
        *(f.name for f in fields(Delta) if f.name not in ("choice", "text", "token_ids"))
    )
    """The fields of a delta other than its text."""
    _EMPTY = _rest(Delta(0))

    def __init__(
        self,
        chunks: Callable[[Delta], list[Json]],
        frame: Callable[[Json], bytes] = OPENAI.frame,
    ) -> None:
        """chunks: builds the chunks of a delta. A delta with only text has one chunk, which differs
        from others in its text only. frame: of the API."""
        self._chunks = chunks
        self._frame = frame
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the text, by choice."""

    def event(self, delta: Delta) -> bytes | None:
        """Returns the framed event, or None when the delta has more than text, or no text."""
        if not delta.text or self._rest(delta) != self._EMPTY:
            return None
        around = self._around.get(delta.choice)
        if around is None:
            (chunk,) = self._chunks(replace(delta, text=self._MARK))
            head, _, tail = self._frame(chunk).partition(encode(self._MARK))
            around = self._around[delta.choice] = head, tail
        return around[0] + encode(delta.text) + around[1]


_HEAD = (
    (b"cache-control", b"no-cache"),
    # nginx would buffer events until its buffer is full.
    (b"x-accel-buffering", b"no"),
)


class EventWriter:
    """Writes one stream. Each `send` carries whole events, so several tasks may write.

    `send` blocks while the client reads slowly; new output is coalesced at the source meanwhile.
    """

    def __init__(self, send: Send, wire: WireFormat) -> None:
        self._send = send
        self.wire = wire
        self._idle = True
        self._open = False

    async def start(self, headers: Sequence[Header]) -> None:
        head = [(b"content-type", self.wire.content_type), *_HEAD, *headers]
        self._open = True
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, documents: Iterable[Json], ids: Sequence[str] = ()) -> None:
        """ids: of the documents' events, where they have any."""
        framed = [self.wire.frame(each) for each in documents]
        for place, event_id in enumerate(ids):
            framed[place] = b"id: %b\n%b" % (event_id.encode(), framed[place])
        if framed:
            await self.write_framed(b"".join(framed))

    async def write_framed(self, events: bytes) -> None:
        """Writes whole events."""
        self._idle = False
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(
        self, error: BatonError | None = None, answer: AnswerWriter | None = None
    ) -> None:
        """Ends the stream, with its failure if it has one. answer: what was written."""
        wire, event = self.wire, self.wire.end
        if error is not None:
            told = answer.failure(error) if answer is not None else None
            event = wire.frame(told or wire.failure(error, error.request_id))
        self._open = False
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def break_off(self, error: BatonError) -> None:
        """Ends a running stream with an error, if the client reads it within FAREWELL_S."""
        if not self._open:
            return
        with suppress(Exception):
            async with asyncio.timeout(FAREWELL_S):
                await self.end(error)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Within the block, sends a comment whenever nothing else was sent for KEEP_ALIVE_S."""
        ticker = asyncio.ensure_future(self._tick())
        try:
            yield
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._idle and self.wire.keep_alive:
                await self.write_framed(self.wire.keep_alive)
            self._idle = True


async def in_parallel(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all at once. The first failure cancels the others and is raised."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
