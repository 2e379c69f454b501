"""Drives requests: clients over HTTP and gRPC, an open loop and a closed loop.

A client builds a request of token ids (`prepare`) and sends it (`ask`). `OpenLoop` sends a
workload's requests when they are due, independent of earlier ones; `closed` keeps a fixed number of
requests open. Both return a `Sample` of each request, with the times of its tokens. Latencies count
from when a request was due: a user also waits while this process or the server is busy (coordinated
omission).

httpx costs 70 times as much CPU time per streamed request as the connection here (5 ms instead of
0.07 ms), and aiohttp 3 times as much; a load generator also measures the time that it uses itself.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, count
from typing import Any, Protocol, Self, TypeAlias, cast

import grpc
import httptools
import msgspec

from batonlm.cli.access import Access
from batonlm.cli.http_client import ConnectionLost, Unreachable, connecting, trust
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.rpc.address import split
from batonlm.rpc.channels import open_client_channel
from batonlm.rpc.server import PUBLIC_STREAMS
from batonlm.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ANSWERED = "answered"
REFUSED = "refused"
NOT_SENT = "not sent"
UNENDED = "not ended"

Ids: TypeAlias = "array[int]"
OnTokens = Callable[[Sequence[int], int], None]
"""Called when tokens of an answer arrive, with their ids, as far as known, and their number."""

AHEAD_TOKENS = 4_000_000
"""Prompt tokens of requests that are built before they are due; about 15 bytes each."""

CACHED_PIECES, LONGEST_CACHED = 2048, 4096
"""How many pieces of prompts are cached, because many prompts begin with them, and the tokens of
the longest cached piece."""

LONGEST_EVENT = 64 * 2**20
"""Bytes of a server-sent event; a longer one is a failure."""

SPARE_S = 0.05
"""For this long before a request is due, no other request is built."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens. Pieces with one key have the same tokens, up to the shorter length."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    pieces: tuple[Piece, ...]
    """The part of the prompt after the prompt and answer of the previous turn."""
    output_tokens: int
    pause_s: float = 0.0
    """Seconds between the end of the previous answer and the time when this turn is due."""

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation. The first turn is due at due_s."""

    due_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, ordered by when they are due."""

    sessions: tuple[Session, ...]
    seconds: float
    """Sessions are due before this time."""
    shortened: int = 0
    """Requests that were cut to the maximum length, and turns that were left out because of it."""

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


class TokenIds:
    """Draws token ids from `first` to `last` inclusive, always the same for a key and seed.

    The model must know all of these ids, and none should be a special token.
    """

    def __init__(self, seed: int, first: int, last: int) -> None:
        """Raises InvalidArgument (field "token_ids")."""
        if not 0 <= first < last < 2**31:
            raise InvalidArgument("must be FIRST-LAST, two different ids", field="token_ids")
        self._seed, self._first, self._span = seed, first, last - first + 1
        self._cached = lru_cache(CACHED_PIECES)(self._ids)

    def prompt(self, pieces: Iterable[Piece]) -> Ids:
        found = array("q")
        for piece in pieces:
            found += (self._cached if piece.tokens <= LONGEST_CACHED else self._ids)(piece)
        return found

    def _ids(self, piece: Piece) -> Ids:
        drawn = random.Random(f"{self._seed} {piece.key}").randbytes(4 * piece.tokens)
        words = array("I", drawn)
        if sys.byteorder == "big":
            words.byteswap()
        first, span = self._first, self._span
        return array("q", [first + word % span for word in words])


ORDINARY = (64, 1899)
"""The first and last of a range of token ids that are ordinary in most vocabularies."""


def random_prompts(seed: int, requests: int, tokens: int) -> list[Ids]:
    """Returns prompts of one length, no two of which share a prefix."""
    ids = TokenIds(seed, *ORDINARY)
    return [ids.prompt([Piece(str(number), tokens)]) for number in range(requests)]


@dataclass(slots=True)
class Sample:
    """The outcome of one request, as its client saw it. Times are seconds from the start of the
    run."""

    due_s: float
    """When it should have been sent."""
    prompt_tokens: int = 0
    turn: int = 0
    """Its index within its session."""
    left_s: float = 0.0
    """When it was sent."""
    first_s: float = 0.0
    """When its first token arrived."""
    last_s: float = 0.0
    """When its last token arrived."""
    ended_s: float = 0.0
    tokens: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Times between consecutive tokens; 0 between tokens that arrived together."""
    ids: list[int] = field(default_factory=list)
    """The answer's token ids, if they are kept."""
    end: str = UNENDED
    """ANSWERED in full, REFUSED, NOT_SENT, UNENDED, or the kind of error."""

    def add(self, at_s: float, num_tokens: int) -> None:
        """Records the arrival of at least one token."""
        if self.tokens:
            self.gaps_s.append(at_s - self.last_s)
        else:
            self.first_s = at_s
        if num_tokens > 1:
            self.gaps_s.extend([0.0] * (num_tokens - 1))
        self.last_s = at_s
        self.tokens += num_tokens

    @property
    def sent(self) -> bool:
        return self.end != NOT_SENT

    @property
    def lag_s(self) -> float:
        """How much later it was sent than it was due."""
        return max(0.0, self.left_s - self.due_s)

    @property
    def between_s(self) -> float:
        """The mean time between tokens."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def events_s(self) -> list[float]:
        """The times at which tokens arrived."""
        gaps = (gap for gap in self.gaps_s if gap)
        return list(accumulate(gaps, initial=self.first_s)) if self.tokens else []

    def meets(self, first_s: float, between_s: float) -> bool:
        """Returns whether it was answered in full and within both limits: the time to the first
        token, counted from when it was due, and the mean time between tokens."""
        return (
            self.end == ANSWERED
            and self.first_s - self.due_s <= first_s
            and self.between_s <= between_s
        )


class LoadClient(Protocol):
    """Sends requests to a server. Many calls of `ask` may run concurrently."""

    def prepare(self, ids: Sequence[int], output_tokens: int) -> Any:
        """Builds a greedy request with an answer of known length."""

    async def ask(self, request: Any, on_tokens: OnTokens) -> str:
        """Sends a request and returns its end, with the values of Sample.end."""


class _Closing:
    """A client that is closed at the end of its `async with` block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class HttpHead:
    """Status and headers of an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names are in lower case."""


class HttpConnection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection, for one request at a time. Close it."""

    def __init__(self) -> None:
        self.usable = True
        """Whether another request can be sent, as far as is known."""
        self.answered = False
        """Whether any byte of an answer to the last request arrived."""
        self._parser = httptools.HttpResponseParser(self)
        self._on_body: Callable[[bytes], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = HttpHead()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, host: str, port: int, trusted: ssl.SSLContext | None = None
    ) -> HttpConnection:
        """Raises Unreachable, or InvalidArgument for a certificate that is not trusted."""
        loop = asyncio.get_running_loop()
        async with connecting():
            _, connection = await loop.create_connection(cls, host, port, ssl=trusted)
        return connection

    async def ask(self, request: bytes, on_body: Callable[[bytes], None]) -> HttpHead:
        """Sends a request and returns when the answer has ended.

        on_body: called with the pieces of a body of status 200 as they arrive; it must not raise.
        Raises ConnectionLost. After that, or when cancelled, the connection is unusable.
        """
        if not self.usable or self._transport is None:
            raise ConnectionLost
        self._head, self._on_body, self.answered = HttpHead(), on_body, False
        self._done = asyncio.get_running_loop().create_future()
        whole = False
        try:
            self._transport.write(request)
            await self._done
            whole = True
        finally:
            self._done = self._on_body = None
            if not whole:
                self.close()
        return self._head

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lost()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _lost(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLost())
        self.close()

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head.status = self._parser.get_status_code()
        if self._head.status != 200:
            self._on_body = None

    def on_body(self, part: bytes) -> None:
        if self._on_body is not None:
            self._on_body(part)

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Events:
    """Parses the server-sent events of one streamed completion, and counts its tokens.

    If a server sends no token ids, each event with text counts as one token.
    """

    def __init__(self, on_tokens: OnTokens) -> None:
        self.done = False
        """Whether the answer ended with [DONE]."""
        self.failed = False
        """Whether an event was an error or malformed."""
        self._on_tokens = on_tokens
        self.unread = b""
        """The beginning of the next event."""

    def feed(self, part: bytes) -> None:
        """Processes the next part of the body, which may be split anywhere."""
        unread = self.unread + part if self.unread else part
        *events, self.unread = unread.replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self.unread) > LONGEST_EVENT:
            self.failed, self.unread = True, b""
        for event in events:
            if event.startswith(b"data:"):
                self._read(event[5:].strip())

    def _read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError:
            self.failed = True
            return
        if chunk.error is not None:
            self.failed = True
        for choice in chunk.choices:
            if choice.token_ids:
                self._on_tokens(choice.token_ids, len(choice.token_ids))
            elif choice.token_ids is None and choice.text:
                self._on_tokens((), 1)


class HttpLoadClient(_Closing):
    """Uses one server's /v1/completions, with one connection per open request. Close it."""

    def __init__(
        self, access: Access, model: str = "", fields: Mapping[str, object] | None = None
    ) -> None:
        """fields: added to every request's body. Raises InvalidArgument for an invalid address or
        CA."""
        self._host, self._port = split(access.address, "http")
        self._trust = trust(access.ca)
        self.header = f"host: {access.address}\r\n"
        self.header += f"authorization: Bearer {access.key}\r\n" if access.key else ""
        self._fields = {
            **({"model": model} if model else {}),
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **(fields or {}),
        }
        self._idle: list[HttpConnection] = []
        self.retry_after_s: list[float] = []
        """The Retry-After values of refusals."""

    def prepare(self, ids: Sequence[int], output_tokens: int) -> bytes:
        body = {"prompt": list(ids), "max_tokens": output_tokens, **self._fields}
        return self.post("/v1/completions", body)

    def post(self, path: str, body: object) -> bytes:
        """Builds a request for any path."""
        text = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\n{self.header}content-type: application/json\r\n"
        return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text

    async def ask(self, request: bytes, on_tokens: OnTokens) -> str:
        """Raises InvalidArgument for a certificate that is not trusted."""
        events = Events(on_tokens)
        try:
            head = await self.send(request, events.feed)
        except Unreachable:
            return "no connection"
        except ConnectionLost:
            return "connection lost"
        if head.status == 429:
            self.retry_after_s.append(float(head.headers.get("retry-after", 0)))
            return REFUSED
        if head.status != 200:
            return f"status {head.status}"
        if events.failed:
            return "failed while it streamed"
        return ANSWERED if events.done else "ended early"

    async def send(self, request: bytes, on_body: Callable[[bytes], None]) -> HttpHead:
        """Sends any request, on a kept or a new connection. Raises Unreachable, ConnectionLost."""
        while True:
            while self._idle and not self._idle[-1].usable:
                self._idle.pop()
            kept = self._idle.pop() if self._idle else None
            connection = kept or await HttpConnection.open(self._host, self._port, self._trust)
            try:
                head = await connection.ask(request, on_body)
                break
            except ConnectionLost:
                # A server may close an idle connection just when it is used again.
                if kept is None or connection.answered:
                    raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return head

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def greedy(
    prompt: Sequence[int] | str, output_tokens: int, model: str = ""
) -> inference_pb2.GenerateRequest:
    """Builds a request with an answer of known length, from token ids or text."""
    request = inference_pb2.GenerateRequest(
        model=model,
        options=inference_pb2.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stop=types_pb2.StopParams(max_tokens=output_tokens, ignore_eos=True),
            return_token_ids=True,
        ),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


@dataclass(slots=True)
class _Channel:
    """A gRPC channel with a single connection."""

    channel: grpc.aio.Channel
    generate: Any
    calls: int = 0
    """The number of open calls."""


class GrpcLoadClient(_Closing):
    """Uses one server's `Inference.Generate`. Close it."""

    def __init__(self, access: Access, model: str = "") -> None:
        """Raises InvalidArgument for an invalid address."""
        split(access.address, "grpc")
        self._access, self._model = access, model
        self._metadata: Any = access.metadata
        self._channels: list[_Channel] = []

    def prepare(
        self, prompt: Sequence[int] | str, output_tokens: int
    ) -> inference_pb2.GenerateRequest:
        return greedy(prompt, output_tokens, self._model)

    async def ask(self, request: inference_pb2.GenerateRequest, on_tokens: OnTokens) -> str:
        line = self._channel()
        line.calls += 1
        whole = False
        call = line.generate(request, metadata=self._metadata)
        try:
            async for response in call:
                event = response.event
                if ids := event.delta.token_ids:
                    on_tokens(ids, len(ids))
                elif event.HasField("finished"):
                    whole = True
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return REFUSED
            return error.code().name.lower().replace("_", " ")
        finally:
            call.cancel()
            line.calls -= 1
        return ANSWERED if whole else "ended early"

    async def close(self) -> None:
        for each in self._channels:
            await each.channel.close()
        self._channels.clear()

    def _channel(self) -> _Channel:
        """Returns a channel with room for a call: a server limits the concurrent calls of a
        connection, and further calls would wait in this process."""
        for each in self._channels:
            if each.calls < PUBLIC_STREAMS:
                return each
        channel = open_client_channel(self._access.address, self._access.ca)
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        self._channels.append(_Channel(channel, stub.Generate))
        return self._channels[-1]


async def follow(
    client: LoadClient,
    request: Any,
    began: float,
    sample: Sample | None = None,
    timeout_s: float = 600.0,
) -> Sample:
    """Sends one request, and returns its sample, with token ids, at the end of the answer. The
    given sample is updated while the request runs.

    began: the start of the run, on the clock of time.perf_counter.
    """
    sample = Sample(time.perf_counter() - began) if sample is None else sample
    sample.left_s = time.perf_counter() - began

    def on_tokens(ids: Sequence[int], num_tokens: int) -> None:
        sample.add(time.perf_counter() - began, num_tokens)
        sample.ids.extend(ids)

    try:
        async with asyncio.timeout(timeout_s):
            sample.end = await client.ask(request, on_tokens)
    except TimeoutError:
        sample.end = "timed out"
    finally:
        sample.ended_s = time.perf_counter() - began
    return sample


async def closed(
    client: LoadClient,
    requests: Iterable[Any],
    concurrency: int,
    *,
    seconds: float = math.inf,
    pause_s: float = 0.0,
) -> list[Sample]:
    """Keeps `concurrency` requests open until there are no more, or starts none after `seconds`.

    Returns the samples in the order of the requests. pause_s: before the next request after one
    that was not answered.
    """
    numbered = zip(count(), requests, strict=False)
    found: dict[int, Sample] = {}
    began = time.perf_counter()

    async def one_at_a_time() -> None:
        for number, request in numbered:
            found[number] = await follow(client, request, began)
            if time.perf_counter() - began >= seconds:
                return
            if found[number].end != ANSWERED:
                await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_at_a_time())
    return [found[number] for number in sorted(found)]


async def answers(
    address: str, prompts: Iterable[Sequence[int] | str], output_tokens: int, concurrency: int
) -> list[Sample]:
    """Sends all prompts to a router over gRPC, in a closed loop.

    Raises BatonError if a request is not answered in full.
    """
    async with GrpcLoadClient(Access(address)) as client:
        requests = [client.prepare(prompt, output_tokens) for prompt in prompts]
        return all_answered(await closed(client, requests, concurrency))


def all_answered(samples: list[Sample]) -> list[Sample]:
    """Returns the samples. Raises BatonError if a request was not answered in full."""
    for sample in samples:
        if sample.end != ANSWERED:
            raise BatonError(f"a request failed: {sample.end}")
    return samples


def tokens_per_second(samples: Sequence[Sample]) -> float:
    """Returns the rate from the start of the run to its last token."""
    return sum(one.tokens for one in samples) / max(one.ended_s for one in samples)


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of an open loop."""

    now: Callable[[], float] = time.perf_counter
    """Seconds on a monotonic clock."""
    spin_s: float = 0.0015
    """The last part of a wait polls the clock, because an event loop's timers have a resolution of
    milliseconds."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits of an open loop."""

    open: int = 4096
    """Maximum number of open requests; further ones are not sent."""
    request_s: float = 120.0
    """Time limit of one request."""
    rest_s: float = 120.0
    """Time from the last arrival to the end of all sessions."""


@dataclass(slots=True)
class Run:
    """The result of an open loop."""

    samples: list[Sample]
    seconds: float
    """The period for which arrivals were drawn."""
    not_asked: int = 0
    """Turns that were never due, because the previous turn was not answered in full or time was up.
    """
    shortened: int = 0
    """See Workload.shortened."""
    stopped: bool = False
    """Whether it was stopped early."""
    most_open: int = 0
    """The largest number of concurrently open requests."""


class OpenLoop:
    """Sends a workload's requests when they are due.

    show: called with the run and the number of open requests whenever a request ends or is not
    sent.
    """

    def __init__(
        self,
        client: LoadClient,
        token_ids: TokenIds,
        limits: LoadLimits | None = None,
        clock: Clock | None = None,
        show: Callable[[Run, int], None] = lambda run, num_open: None,
    ) -> None:
        self._client, self._token_ids = client, token_ids
        self._limits, self._clock = limits or LoadLimits(), clock or Clock()
        self._show = show
        self._open = 0
        self._began = 0.0
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    def stop(self) -> None:
        """Sends no more requests and does not wait for open ones."""
        self._stopping.set()

    async def run(self, workload: Workload) -> Run:
        """Runs a workload, until rest_s after the last arrival at the latest."""
        run = Run([], workload.seconds, shortened=workload.shortened)
        ahead = _Ahead(self._client.prepare, self._token_ids, workload)
        await self._make(ahead, math.inf)
        turns = 0
        self._began = self._clock.now()
        try:
            for session in workload.sessions:
                # The wait is used to build the next requests.
                await self._make(ahead, session.due_s - SPARE_S)
                await self._until(session.due_s)
                if self._stopping.is_set():
                    break
                turns += len(session.turns)
                task = asyncio.create_task(self._session(run, session, *ahead.take()))
                self._running.add(task)
                task.add_done_callback(self._ended)
            await self._rest()
        finally:
            left = list(self._running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._fault is not None:
            raise self._fault
        run.not_asked = turns - len(run.samples)
        run.stopped = self._stopping.is_set()
        return run

    async def _make(self, ahead: _Ahead, until_s: float) -> None:
        """Builds requests ahead while there is time and room. Other tasks run in between."""
        while self._now() < until_s and not self._stopping.is_set():
            if not ahead.make():
                return
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = self._fault or fault
            self._stopping.set()

    async def _rest(self) -> None:
        if not self._running:
            return
        ends = [
            asyncio.ensure_future(asyncio.wait(self._running)),
            asyncio.ensure_future(self._stopping.wait()),
        ]
        timeout = self._limits.rest_s
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _session(self, run: Run, session: Session, prompt: Ids, request: Any) -> None:
        last = len(session.turns) - 1
        due_s = session.due_s
        for index, turn in enumerate(session.turns):
            if index:
                due_s = self._now() + turn.pause_s
                prompt = prompt + self._token_ids.prompt(turn.pieces)
                request = self._client.prepare(prompt, turn.output_tokens)
                await self._until(due_s)
            sample = Sample(due_s, len(prompt), index)
            run.samples.append(sample)
            await self._ask(run, sample, request, index < last)
            if sample.end != ANSWERED:
                return
            prompt = prompt + array("q", sample.ids)
            sample.ids = []

    async def _ask(self, run: Run, sample: Sample, request: Any, keeps_ids: bool) -> None:
        if self._open >= self._limits.open:
            sample.end = NOT_SENT
            self._show(run, self._open)
            return

        def on_tokens(ids: Sequence[int], num_tokens: int) -> None:
            sample.add(self._now(), num_tokens)
            if keeps_ids:
                sample.ids.extend(ids)

        self._open += 1
        run.most_open = max(run.most_open, self._open)
        sample.left_s = self._now()
        try:
            async with asyncio.timeout(self._limits.request_s):
                sample.end = await self._client.ask(request, on_tokens)
        except TimeoutError:
            sample.end = "timed out"
        except asyncio.CancelledError:
            sample.end = UNENDED
            raise
        finally:
            sample.ended_s = self._now()
            self._open -= 1
            self._show(run, self._open)
        if sample.end == ANSWERED and not sample.tokens:
            sample.end = "no token"

    async def _until(self, due_s: float) -> None:
        """Waits until due_s. Other tasks run at least once, even if that is over."""
        wait_s = due_s - self._now() - self._clock.spin_s
        if wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()
        await asyncio.sleep(0)
        # This polls the clock, so there is no event to wait for.
        while self._clock.spin_s and self._now() < due_s and not self._stopping.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _now(self) -> float:
        return self._clock.now() - self._began


class _Ahead:
    """Builds the first requests of a workload's sessions, in order, before they are due."""

    def __init__(
        self,
        prepare: Callable[[Sequence[int], int], Any],
        token_ids: TokenIds,
        workload: Workload,
    ) -> None:
        self._prepare, self._token_ids = prepare, token_ids
        self._rest = iter(workload.sessions)
        self._made: deque[tuple[Ids, Any]] = deque()
        self._tokens = 0

    def make(self) -> bool:
        """Builds one more. Returns False if there was no room or none left."""
        return self._tokens < AHEAD_TOKENS and self._next()

    def take(self) -> tuple[Ids, Any]:
        """Returns the prompt and the request of the next session."""
        if not self._made:
            self._next()
        prompt, request = self._made.popleft()
        self._tokens -= len(prompt)
        return prompt, request

    def _next(self) -> bool:
        session = next(self._rest, None)
        if session is None:
            return False
        turn = session.turns[0]
        prompt = self._token_ids.prompt(turn.pieces)
        self._made.append((prompt, self._prepare(prompt, turn.output_tokens)))
        self._tokens += len(prompt)
        return True
