"""The blocking and the asyncio client: channels to routers, and streams of events.

`_Requests` and `_Received` hold what both clients share. One router is asked until it fails, and
then the next one. Where the events of a stream have ids, its request is sent again with the last
one, so that the next router goes on after that event; it reads what still runs, or runs the request
again (`core.request.resumption`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

import grpc

from batonlm.client.messages import (
    Messages,
    Options,
    Ranked,
    Scores,
    Texts,
    Vectors,
    chat_request,
    embed_request,
    generate_request,
    ranked,
    score_request,
    scores_from_proto,
    vectors_from_proto,
)
from batonlm.core.errors import (
    BatonError,
    Cancelled,
    InvalidArgument,
    Unavailable,
    Unimplemented,
)
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import (
    Accepted,
    Delta,
    Event,
    Finished,
    Tool,
    ToolChoice,
    join_deltas,
)
from batonlm.rpc.address import split
from batonlm.rpc.channels import open_blocking_channel, open_client_channel
from batonlm.rpc.convert import model_from_proto
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.inference import event_from_proto
from batonlm.rpc.peers import Metadata, api_key_metadata, check_api_key
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class Retries:
    """When a failed call is retried. The pauses apply where the server sends no hint; half of each
    is random, so that clients do not retry all at once."""

    most: int = 2
    """The number of rounds over all addresses after the first one, while nothing was received."""
    first_s: float = 0.5
    """The first pause, after a round. Each later pause is twice as long as the one before."""
    longest_s: float = 8.0
    most_resumes: int = 30
    """The same number after a stream has broken off, until something new is received."""
    resume_s: float = 60.0
    """The longest time for those rounds."""


DEFAULT = Retries()

LEAVE_S = 1.0
"""The longest that closing a stream takes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    accepted: Accepted
    choices: tuple[Delta, ...]
    """One Delta per choice, with the whole text."""
    finished: Finished

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class _Routers:
    """The routers at a client's addresses. The current one is asked until it fails."""

    def __init__(self, channels: Sequence[Any]) -> None:
        self.channels = channels
        self.closed = False
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceStub(each) for each in channels]
        self._current = 0

    def __len__(self) -> int:
        return len(self._stubs)

    @property
    def current(self) -> Any:
        """The stub of the service."""
        return self._stubs[self._current]

    def failed(self, stub: Any) -> None:
        """From now on another one is asked, unless that is so already."""
        if self.current is stub:
            self._current = (self._current + 1) % len(self._stubs)


class _Call:
    """One request, which may take several calls until a part of its answer was received, and where
    its events have ids, until all of it was."""

    def __init__(
        self,
        routers: _Routers,
        method: str,
        request: Any,
        retries: Retries,
        timeout_s: float | None,
        metadata: Metadata,
        *,
        may_go_without_ids: bool = False,
    ) -> None:
        """method: its name. timeout_s: for all calls together. may_go_without_ids: the caller did
        not ask for ids of events. A call that continues a stream changes the request."""
        self._routers = routers
        self._method = method
        self._request = request
        self._retries = retries
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._may_go_without_ids = may_go_without_ids
        self._stub = routers.current
        """Of the latest call."""
        self._deadline: float | None = None
        self._begun = False
        self._failures = 0
        """Calls that failed since something new was received."""
        self._broke_off: float | None = None
        """When the first of these failed, once a part of the answer was received."""
        self._has_part = False
        """Whether a part of the answer was received."""
        self._last_event_id = ""
        """After which event another call goes on."""

    def begin(self) -> Any:
        """Makes the next call with the remaining time. The first call starts the clock."""
        if self._routers.closed:
            raise Cancelled("The client was closed.")
        if self._last_event_id:
            self._request.options.last_event_id = self._last_event_id
        now = time.monotonic()
        if not self._begun and self._timeout_s is not None:
            self._deadline = now + self._timeout_s
        self._begun = True
        left_s = None if self._deadline is None else max(0.0, self._deadline - now)
        self._stub = self._routers.current
        method = getattr(self._stub, self._method)
        return method(self._request, timeout=left_s, metadata=self._metadata)

    def received(self, message: pb.GenerationEvent) -> Event | None:
        """Returns the event; None for one that a former call has brought, and for a kind that this
        client does not know (from a newer server). Raises Unimplemented where a server begins
        anew."""
        again, self._last_event_id = bool(self._last_event_id), message.id
        if again and not message.id:
            raise Unimplemented("The server is too old to go on with a stream.")
        self._has_part = True
        if again and message.HasField("accepted"):
            return None
        self._failures, self._broke_off = 0, None
        return event_from_proto(message)

    def pause_s(self, failure: Any) -> float:
        """Returns the seconds to wait before the next call. Raises the failure as a BatonError if
        a retry cannot help, or if a part of the answer was received and nothing can go on."""
        if self._routers.closed:
            raise Cancelled("The client was closed.") from None
        error: BatonError = from_rpc_error(failure)
        if self._may_go_without_ids and error.field == "options.event_ids":
            # Either of two models answers under this name.
            self._may_go_without_ids = self._request.options.event_ids = False
            return 0.0
        if not error.retryable or (self._has_part and not self._last_event_id):
            raise error from None
        now = time.monotonic()
        ends = [] if self._deadline is None else [self._deadline]
        most = self._retries.most
        if self._has_part:
            self._broke_off = now if self._broke_off is None else self._broke_off
            ends.append(self._broke_off + self._retries.resume_s)
            most = self._retries.most_resumes
        self._failures += 1
        rounds, rest = divmod(self._failures, len(self._routers))
        if rounds > most:
            raise error from None
        self._routers.failed(self._stub)
        pause_s = 0.0 if rest else self._after_round_s(rounds, error)
        if any(now + pause_s >= end for end in ends):
            raise error from None
        return pause_s

    def _after_round_s(self, rounds: int, error: BatonError) -> float:
        if error.retry_after_s is not None:
            return error.retry_after_s
        most_s = min(self._retries.longest_s, self._retries.first_s * 2.0 ** (rounds - 1))
        return most_s * random.uniform(0.5, 1.0)

    def leave(self) -> Any:
        """Makes the call that says that the client does not come back to its stream; None where the
        router takes that from the end of the connection."""
        if self._routers.closed or not self._last_event_id:
            return None
        message = pb.LeaveRequest(last_event_id=self._last_event_id)
        return self._stub.Leave(message, timeout=LEAVE_S, metadata=self._metadata)


class _Received:
    """The part of a stream that was read so far."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._parts: dict[int, list[Delta]] = {}
        self.accepted: Accepted | None = None
        """The first event, once received."""
        self.finished: Finished | None = None
        """The last event, once received."""

    def _add(self, event: Event) -> Event:
        match event:
            case Delta():
                self._parts.setdefault(event.choice, []).append(event)
            case Accepted():
                self.accepted = event
            case Finished():
                self.finished = event
        return event

    def _answer(self) -> Answer:
        """Raises Unavailable if the stream ended too early."""
        if self.accepted is None or self.finished is None:
            raise Unavailable("The answer broke off.")
        choices = tuple(join_deltas(choice, parts) for choice, parts in sorted(self._parts.items()))
        return Answer(self.accepted, choices, self.finished)


S = TypeVar("S", bound=_Received)


class _Requests(Generic[S]):
    """Makes a client's requests to the routers at its addresses. A context manager."""

    _open_channel: ClassVar[Callable[[str, bytes | None], Any]]
    _stream: type[S]

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str = "",
        tls: bool | bytes = False,
        timeout_s: float | None = None,
        retries: Retries = DEFAULT,
        resume: bool = True,
    ) -> None:
        """address: "host:port" of a router, or several; the next one is asked when one fails. tls:
        True trusts the system's CAs; bytes are the PEM of the CA to trust. timeout_s: the default
        for calls without one. resume: whether streams that break off go on, where the option
        event_ids does not say. Raises InvalidArgument with the argument's name."""
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses:
            raise InvalidArgument("address must name a router", field="address")
        for each in addresses:
            host, _ = split(each, "address")
            check_api_key(api_key, host, tls=bool(tls))
        self._metadata = api_key_metadata(api_key)
        ca = tls if isinstance(tls, bytes) else b"" if tls else None
        self._routers = _Routers([type(self)._open_channel(each, ca) for each in addresses])
        self._timeout_s = timeout_s
        self._retries = retries
        self._resume = resume

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout_s: float | None = None,
        idempotency_key: str = "",
        **options: Unpack[Options],
    ) -> S:
        """Continues a text or token ids. The request is sent when the stream is first read.
        idempotency_key: while a request with it runs, the same one is answered by its run."""
        request = generate_request(prompt, model, options)
        return self._begin("Generate", request, timeout_s, idempotency_key, options)

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        timeout_s: float | None = None,
        idempotency_key: str = "",
        **options: Unpack[Options],
    ) -> S:
        """Answers a conversation. The request is sent when the stream is first read.
        idempotency_key: see `generate`."""
        request = chat_request(messages, model, tools, tool_choice, options)
        return self._begin("Chat", request, timeout_s, idempotency_key, options)

    def _begin(
        self,
        method: str,
        request: pb.GenerateRequest | pb.ChatRequest,
        timeout_s: float | None,
        idempotency_key: str,
        options: Options,
    ) -> S:
        by_default = self._resume and "event_ids" not in options
        if by_default:
            request.options.event_ids = True
        key = (("idempotency-key", idempotency_key),) if idempotency_key else ()
        call = self._call(method, request, timeout_s, key, may_go_without_ids=by_default)
        return self._stream(call)

    def _call(
        self,
        method: str,
        request: object,
        timeout_s: float | None,
        metadata: Metadata = (),
        *,
        may_go_without_ids: bool = False,
    ) -> _Call:
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        return _Call(
            self._routers,
            method,
            request,
            self._retries,
            allowed_s,
            (*self._metadata, *metadata),
            may_go_without_ids=may_go_without_ids,
        )


class Stream(_Received, Iterator[Event]):
    """Iterates over the events of one answer as they arrive. Failures are raised as BatonErrors.

    Close it, or leave its `with`, to cancel the request. One that is only dropped may run on for
    some seconds, as if it had broken off.
    """

    def __init__(self, call: _Call) -> None:
        super().__init__(call)
        self._events = self._run()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        return self._add(next(self._events))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._events.close()
        if self.finished is None:
            # It ends soon in any case.
            with suppress(grpc.RpcError):
                self._call.leave()

    @property
    def text(self) -> str:
        """Reads to the end and returns the whole text of the first choice."""
        return self.read().text

    def read(self) -> Answer:
        """Reads to the end and returns the whole answer, with the parts already iterated over."""
        for _ in self:
            pass
        return self._answer()

    def _run(self) -> Generator[Event, None, None]:
        while True:
            call = self._call.begin()
            try:
                for response in call:
                    event = self._call.received(response.event)
                    if event is not None:
                        yield event
                return
            except grpc.RpcError as failure:
                pause_s = self._call.pause_s(failure)
            finally:
                call.cancel()
            time.sleep(pause_s)


class Client(_Requests[Stream]):
    """The blocking client. It is thread-safe."""

    _open_channel = open_blocking_channel
    _stream = Stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the open streams."""
        self._routers.closed = True
        for channel in self._routers.channels:
            channel.close()

    def models(self, *, timeout_s: float | None = None) -> list[ModelDescription]:
        """Returns the served models. Raises BatonError."""
        answer = self._answer("ListModels", pb.ListModelsRequest(), timeout_s)
        return [model_from_proto(model) for model in answer.models]

    def embed(
        self,
        inputs: Texts,
        *,
        model: str = "",
        dimensions: int = 0,
        truncate_tokens: int | None = None,
        prompt_name: str = "",
        timeout_s: float | None = None,
    ) -> Vectors:
        """Returns the vectors of texts or token ids.

        dimensions: numbers of each vector to keep, from its start; 0: all. truncate_tokens: drops
        what exceeds so many tokens, -1: what exceeds the model's length; None: that is an error.
        prompt_name: of the model's prompts, the one that goes before each text; "": its default
        one. Raises BatonError.
        """
        request = embed_request(inputs, model, dimensions, truncate_tokens, prompt_name)
        return vectors_from_proto(self._answer("Embed", request, timeout_s))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str = "",
        truncate_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Returns how well each document answers the query. truncate_tokens: see `embed`. Raises
        BatonError."""
        request = score_request(query, documents, model, truncate_tokens)
        return scores_from_proto(self._answer("Score", request, timeout_s))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        model: str = "",
        truncate_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Ranked]:
        """Returns the documents, or the best `top_n` of them, by how well each answers the query,
        best first. Raises BatonError."""
        scores = self.score(
            query,
            documents,
            model=model,
            truncate_tokens=truncate_tokens,
            timeout_s=timeout_s,
        )
        return ranked(scores, documents, top_n)

    def _answer(self, method: str, request: object, timeout_s: float | None) -> Any:
        """Of a call with one answer. Raises BatonError."""
        call = self._call(method, request, timeout_s)
        while True:
            try:
                return call.begin()
            except grpc.RpcError as failure:
                time.sleep(call.pause_s(failure))


class AsyncStream(_Received, AsyncIterator[Event]):
    """The asyncio version of `Stream`."""

    def __init__(self, call: _Call) -> None:
        super().__init__(call)
        self._events = self._run()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        return self._add(await anext(self._events))

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._events.aclose()
        if self.finished is None and (leaving := self._call.leave()) is not None:
            # It ends soon in any case.
            with suppress(grpc.aio.AioRpcError):
                await leaving

    async def text(self) -> str:
        """Reads to the end and returns the whole text of the first choice."""
        return (await self.read()).text

    async def read(self) -> Answer:
        """Reads to the end and returns the whole answer, with the parts already iterated over."""
        async for _ in self:
            pass
        return self._answer()

    async def _run(self) -> AsyncGenerator[Event, None]:
        while True:
            call = self._call.begin()
            try:
                async for response in call:
                    event = self._call.received(response.event)
                    if event is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as failure:
                pause_s = self._call.pause_s(failure)
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)


class AsyncClient(_Requests[AsyncStream]):
    """The asyncio client, for use on one event loop."""

    _open_channel = open_client_channel
    _stream = AsyncStream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the open streams."""
        self._routers.closed = True
        for channel in self._routers.channels:
            await channel.close()

    async def models(self, *, timeout_s: float | None = None) -> list[ModelDescription]:
        """Returns the served models. Raises BatonError."""
        answer = await self._answer("ListModels", pb.ListModelsRequest(), timeout_s)
        return [model_from_proto(model) for model in answer.models]

    async def embed(
        self,
        inputs: Texts,
        *,
        model: str = "",
        dimensions: int = 0,
        truncate_tokens: int | None = None,
        prompt_name: str = "",
        timeout_s: float | None = None,
    ) -> Vectors:
        """See `Client.embed`."""
        request = embed_request(inputs, model, dimensions, truncate_tokens, prompt_name)
        return vectors_from_proto(await self._answer("Embed", request, timeout_s))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str = "",
        truncate_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """See `Client.score`."""
        request = score_request(query, documents, model, truncate_tokens)
        return scores_from_proto(await self._answer("Score", request, timeout_s))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        model: str = "",
        truncate_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Ranked]:
        """See `Client.rerank`."""
        scores = await self.score(
            query,
            documents,
            model=model,
            truncate_tokens=truncate_tokens,
            timeout_s=timeout_s,
        )
        return ranked(scores, documents, top_n)

    async def _answer(self, method: str, request: object, timeout_s: float | None) -> Any:
        """Of a call with one answer. Raises BatonError."""
        call = self._call(method, request, timeout_s)
        while True:
            try:
                return await call.begin()
            except grpc.aio.AioRpcError as failure:
                await asyncio.sleep(call.pause_s(failure))
