"""The routes of /v1/responses, and what is stored of responses.

What a response continues is read from the store before it runs. It is stored when it is whole,
unless its client does not want that. One in the background is stored when it begins: a task reads
its kept stream (`router.request.kept`) to the end, and other calls may read it, too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import MOST_LETTERS, BatonError, Internal, NotFound
from batonlm.core.request.request import Accepted, Request
from batonlm.core.request.validation import MAX_CHAT_BYTES, MAX_MESSAGES, wrong
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.answers import AnswerWriter
from batonlm.router.api.http.body import while_connected
from batonlm.router.api.http.generation import GeneratingRoute, View, worded
from batonlm.router.api.http.openai_responses import (
    ResponsesAnswer,
    ResponsesCall,
    input_items,
    named_items,
    read_body,
    response_of_item,
    responses_call,
)
from batonlm.router.api.http.parse import GenerationCall
from batonlm.router.api.http.responses import Json, encode, send_json, send_parts
from batonlm.router.api.translation import in_client_words
from batonlm.router.request.pipeline import EventStream, left
from batonlm.router.request.response_store import Dropped, ResponseStore, StoredResponse
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import context_of

log = logging.getLogger(__name__)

MAX_HISTORY_BYTES = 2 * MAX_CHAT_BYTES
"""Of the items of responses that one follows or refers to, as they are stored. Core bounds what
they become."""
MAX_LISTED = 100
"""Items of an input that are listed at a time."""
MAX_DIGITS = 12
CANCEL_S = 5.0
"""Seconds in which a cancelled response says that it is over."""
POLL_S = 1.0
"""Seconds between two looks into the store, in which another process may have cancelled a response
that runs here."""
GRACE_S = 60
"""Seconds after its deadline in which a response may still be stored as what it has become."""


class _Output(msgspec.Struct):
    """What of a stored response its successor needs."""

    output: msgspec.Raw


@dataclass(slots=True)
class _Run:
    """A response that runs in the background of this process."""

    stream: EventStream
    stored: asyncio.Future[None]
    """Done when it can be found in the store, or could not be stored."""
    task: asyncio.Task[None] = field(init=False)


@dataclass(frozen=True, slots=True)
class ResponsesRoute(GeneratingRoute):
    """POST /v1/responses."""

    store: ResponseStore = field(kw_only=True)
    runs: dict[tuple[str, str], _Run] = field(default_factory=dict, kw_only=True)
    """By tenant and id of the response."""

    async def read(self, raw: bytes, tenant: Tenant, holding: Holding) -> GenerationCall:
        body, ignored = read_body(raw)
        own = input_items(body.input)
        before: list[Json] = []
        if body.previous_response_id:
            before = await self._history(tenant, body.previous_response_id, holding)
        own = await self._with_references(tenant, own, holding)
        return responses_call(body, ignored, before, own)

    async def keep(self, call: GenerationCall, answer: AnswerWriter) -> None:
        assert isinstance(call, ResponsesCall) and isinstance(answer, ResponsesAnswer)
        if call.stores and not call.background:
            stored = self._stored(call, answer)
            try:
                await self.store.put(call.requests[0].tenant.name, answer.id, stored)
            except BatonError:
                self._not_stored(answer.id)

    async def respond(
        self,
        call: GenerationCall,
        holding: Holding,
        given: Mapping[str, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        assert isinstance(call, ResponsesCall)
        if call.background and not call.begun:
            with worded(call):
                call, begun = await self._begin(call, holding)
            if not call.stream:
                await send_parts(send, [begun])
                return
        await GeneratingRoute.respond(self, call, holding, given, receive, send)

    async def _history(self, tenant: Tenant, response_id: str, holding: Holding) -> list[Json]:
        """Returns the items of a response and of all that it follows, oldest first."""
        name, found = "previous_response_id", list[list[Json]]()
        size = count = 0
        for stored in await self.store.chain(tenant.name, response_id):
            if _runs(stored):
                raise wrong(name, f"must be of a response that is over, and {response_id} runs")
            items, size = _items(stored, size, holding, name)
            count += len(items)
            if count > MAX_MESSAGES:
                raise wrong(name, f"must be of at most {MAX_MESSAGES} items")
            found.append(items)
            response_id = stored.previous
        if response_id:
            raise _not_stored(response_id, name)
        return [item for items in reversed(found) for item in items]

    async def _with_references(
        self, tenant: Tenant, own: Sequence[Json], holding: Holding
    ) -> list[Json]:
        """Returns the items of an input, with those of stored responses in place of their ids. The
        id of a response is a part of those of its items."""
        responses: dict[str, dict[str, Json]] = {}
        found, size = [], 0
        for index, item in enumerate(own):
            if item["type"] != "item_reference":
                found.append(item)
                continue
            where, response_id = f"input[{index}].id", response_of_item(item["id"])
            if response_id not in responses:
                stored = await self.store.get(tenant.name, response_id)
                items: list[Json] = []
                if stored is not None:
                    items, size = _items(stored, size, holding, where)
                responses[response_id] = {each["id"]: each for each in items}
            referenced = responses[response_id].get(item["id"])
            if referenced is None:
                raise NotFound(f"{where} is of no item that is stored here", field=where)
            found.append(referenced)
        return found

    def _not_stored(self, response_id: str) -> None:
        self.store.dropped[Dropped.FAILED] += 1
        log.exception("a response could not be stored", extra=named(response_id))

    def _stored(self, call: ResponsesCall, answer: ResponsesAnswer) -> StoredResponse:
        items = named_items(call, answer.id)
        previous = call.body.previous_response_id or ""
        return StoredResponse(encode(answer.whole()), encode(items), previous)

    async def _begin(self, call: ResponsesCall, holding: Holding) -> tuple[ResponsesCall, bytes]:
        """Starts a response in the background. Returns the call, which names its kept stream, and
        the document of the response that has begun."""
        (request,) = call.requests
        if not self.store.limits.max_bytes:
            raise wrong("background", "must be false: this router stores no responses")
        if not request.keyed_stream_id:
            request = replace(request, keyed_stream_id=secrets.token_hex(16))
        call = replace(call, requests=(request,), begun=True)
        stream = await self.pipeline.kept.open(request, holding, View(self, call))
        try:
            accepted = await anext(stream)
            assert isinstance(accepted, Accepted)
            answer = ResponsesAnswer(call, [accepted], call.created)
            begun, key = self._stored(call, answer), (request.tenant.name, answer.id)
            run = self.runs.get(key)
            if run is None:
                run = _Run(stream, asyncio.get_running_loop().create_future())
                run.task = self.pipeline.kept.background(self._follow(call, run, answer, begun))
                self.runs[key] = run
        except BaseException:
            await stream.aclose()
            raise
        if run.stream is not stream:
            # A call with the same key was first.
            await stream.aclose()
        await asyncio.shield(run.stored)
        return call, begun.response

    async def _follow(
        self, call: ResponsesCall, run: _Run, answer: ResponsesAnswer, begun: StoredResponse
    ) -> None:
        """Reads a response in the background to its end, and stores it."""
        tenant = call.requests[0].tenant.name
        until = call.created + int(self.pipeline.request_timeout_s) + GRACE_S
        try:
            try:
                await self.store.put(tenant, answer.id, replace(begun, runs_until=until))
            except BatonError as error:
                run.stored.set_exception(error)
                return
            run.stored.set_result(None)
            try:
                whole = await self._read_all(call, run.stream, answer)
            except asyncio.CancelledError:
                await self.store.end(tenant, answer.id, encode(answer.failed(left())))
                raise
            await self.store.end(tenant, answer.id, encode(whole))
        except BatonError:
            self._not_stored(answer.id)
        finally:
            self.runs.pop((tenant, answer.id), None)
            await run.stream.aclose()

    async def _read_all(
        self, call: ResponsesCall, stream: EventStream, answer: ResponsesAnswer
    ) -> Json:
        """Returns the last document of a response."""
        watching = asyncio.ensure_future(self._watch(call, stream, answer.id))
        try:
            async for event in stream:
                answer.count(0, event)
            return answer.whole()
        except BatonError as error:
            return answer.failed(in_client_words(error, call.names))
        except Exception:
            log.exception("a response in the background failed", extra=named(answer.id))
            return answer.failed(Internal("internal error"))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, call: ResponsesCall, stream: EventStream, response_id: str) -> None:
        """Ends a response that another process has cancelled or deleted."""
        while self.store.shared:
            await asyncio.sleep(POLL_S)
            with suppress(BatonError):
                stored = await self.store.get(call.requests[0].tenant.name, response_id)
                if stored is None or not stored.runs_until:
                    stream.call_off()

    # What else clients do with responses.

    async def find(self, tenant: Tenant, response_id: str) -> StoredResponse:
        """Raises NotFound."""
        stored = await self.store.get(tenant.name, response_id)
        with self.pipeline.reading(tenant):
            if stored is None:
                raise _not_stored(response_id, "response_id")
        return stored

    async def cancel(self, request: HttpRequest) -> Response:
        """POST /v1/responses/{id}/cancel: the response, which is over then."""
        async with self.bodies.received(request.scope, request.receive):
            tenant, response_id = caller(request.scope), request.path_params["id"]
            run = self.runs.get((tenant.name, response_id))
            if run is not None:
                run.stream.call_off()
                await asyncio.wait([run.task], timeout=CANCEL_S)
            stored = await self.find(tenant, response_id)
            if run is None and stored.runs_until:
                # It runs in another process, which sees that.
                document = msgspec.json.decode(stored.response) | {"status": "cancelled"}
                await self.store.end(tenant.name, response_id, encode(document))
                stored = await self.find(tenant, response_id)
            return _json(_document(stored))

    async def delete(self, tenant: Tenant, response_id: str) -> Response:
        await self.find(tenant, response_id)
        run = self.runs.get((tenant.name, response_id))
        await self.store.delete(tenant.name, response_id)
        if run is not None:
            run.stream.call_off()
        return _json(encode({"id": response_id, "object": "response", "deleted": True}))

    async def list_items(self, request: HttpRequest) -> Response:
        """GET /v1/responses/{id}/input_items"""
        stored = await self.find(caller(request.scope), request.path_params["id"])
        items: list[Json] = msgspec.json.decode(stored.items)
        query = request.query_params
        order, limit, after = (
            query.get("order", "desc"),
            query.get("limit", "20"),
            query.get("after"),
        )
        if order not in ("asc", "desc"):
            raise wrong("order", "must be asc or desc")
        number = (
            int(limit) if limit.isascii() and limit.isdigit() and len(limit) < MAX_DIGITS else 0
        )
        if not 1 <= number <= MAX_LISTED:
            raise wrong("limit", f"must be from 1 to {MAX_LISTED}")
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise wrong("after", "must be the id of an item of this input")
            items = items[ids.index(after) + 1 :]
        page = items[:number]
        document = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
        return _json(encode(document))


@dataclass(frozen=True, slots=True)
class InputTokensRoute:
    """An ASGI app: POST /v1/responses/input_tokens, with the number of tokens that a response would
    begin with. Raises BatonError or HttpError only before anything is sent."""

    responses: ResponsesRoute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, responses = caller(scope), self.responses
        async with responses.bodies.received(scope, receive) as body:
            with responses.pipeline.reading(tenant):
                call = await responses.read(body.raw, tenant, body.holding)
                text = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
                (request,) = call.of(tenant, context_of(text)).requests
            body.raw = b""
            with worded(call):
                await while_connected(receive, self._count(request, body.holding, send))

    async def _count(self, request: Request, holding: Holding, send: Send) -> None:
        encoded, _ = await self.responses.pipeline.tokenize(request, holding)
        count = {"object": "response.input_tokens", "input_tokens": len(encoded.token_ids)}
        await send_json(send, 200, count)


@dataclass(frozen=True, slots=True)
class StoredResponseRoute:
    """An ASGI app: GET and DELETE of /v1/responses/{id}. Raises BatonError or HttpError only before
    anything is sent."""

    responses: ResponsesRoute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, tenant = HttpRequest(scope), caller(scope)
        response_id = request.path_params["id"]
        if request.method == "DELETE":
            answer = await self.responses.delete(tenant, response_id)
        else:
            stored = await self.responses.find(tenant, response_id)
            if request.query_params.get("stream") in ("true", "1"):
                await self._stream(request, response_id, receive, send)
                return
            answer = _json(_document(stored))
        await answer(scope, receive, send)

    async def _stream(
        self, request: HttpRequest, response_id: str, receive: Receive, send: Send
    ) -> None:
        """Sends the events of a stream that is still kept, after the one that the client names."""
        after = request.query_params.get("starting_after", "-1")
        if not after.isascii() or not after.removeprefix("-").isdigit() or len(after) > MAX_DIGITS:
            raise wrong("starting_after", "must be an integer")
        tenant, pipeline = caller(request.scope), self.responses.pipeline
        with pipeline.receive(tenant, 0) as holding:
            kept = pipeline.kept.find(tenant, response_id.partition("_")[2])
            call = kept.view.call if kept is not None and isinstance(kept.view, View) else None
            if not isinstance(call, ResponsesCall):
                raise wrong(
                    "stream", "must be false: the events of this response are not kept any more"
                )
            again = replace(call, stream=True, starting_after=int(after))
            given = dict(request.scope["headers"])
            headers = {name.decode("latin-1"): value for name, value in given.items()}
            await self.responses.respond(again, holding, headers, receive, send)


def _json(document: bytes) -> Response:
    return Response(document, media_type="application/json")


def _not_stored(response_id: str, field: str) -> NotFound:
    known = response_id[:MOST_LETTERS]
    return NotFound(f"There is no response {known!r}, or not any more.", field=field)


def _runs(stored: StoredResponse) -> bool:
    return stored.runs_until > time.time()


def _document(stored: StoredResponse) -> bytes:
    """Returns what a client gets of a stored response."""
    if not stored.runs_until or _runs(stored):
        return stored.response
    document = msgspec.json.decode(stored.response)
    error = {"code": "server_error", "message": "The router that ran it has ended."}
    return encode(document | {"status": "failed", "error": error})


def _items(
    stored: StoredResponse, size: int, holding: Holding, where: str
) -> tuple[list[Json], int]:
    """Returns the items of a response's own input and of its output, and the bytes that all items
    have with these, of `size` before. The rest of the response, such as its tools, is no part of
    what follows it. Raises InvalidArgument for `where` if they are too many, and what `holding`
    does."""
    output = msgspec.json.decode(stored.response, type=_Output).output
    own_size = len(stored.items) + len(memoryview(output))
    size += own_size
    if size > MAX_HISTORY_BYTES:
        raise wrong(where, f"must be of at most {MAX_HISTORY_BYTES} bytes of items")
    holding.grow(own_size)
    given: list[Json] = msgspec.json.decode(stored.items)
    made: list[Json] = msgspec.json.decode(output)
    return given + made, size
