"""The gRPC service of the detokenizer: one Session stream per router.

Reading never waits for writing: operations are applied as they arrive, new text accumulates in
`OpenTexts`, and one writer sends all of it as one response whenever the stream has room.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from batonlm.core.errors import BatonError, InvalidArgument, Overloaded, Unavailable
from batonlm.core.observe.stages import TraceContext
from batonlm.detokenizer.text import DetokenizeOptions, OpenTexts, TextNews
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.rpc import tracing
from batonlm.rpc.convert import error_to_proto, token_ids_from_bytes
from batonlm.rpc.metrics import TEXT_BYTES, counter
from batonlm.rpc.tracing import OFF, Tracer
from batonlm.v1 import detokenizer_pb2 as pb
from batonlm.v1 import detokenizer_pb2_grpc

HEARTBEAT_S = 0.5
MAX_RESPONSE_CHARACTERS = 1 << 18
MAX_KEPT_SPECIAL_TOKENS = 64
BURST_TOKENS = 4096
"""Tokens processed before the session yields to other sessions and heartbeats."""

Context = grpc.aio.ServicerContext[pb.DetokenizerSessionRequest, pb.DetokenizerSessionResponse]


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServicer):
    """Serves `baton.v1.Detokenizer`.

    max_texts: open texts per session; more are refused. max_unsent_bytes: what a router may leave
    unread before its session ends.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        max_texts: int,
        max_unsent_bytes: int,
        tracer: Tracer = OFF,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_texts = max_texts
        self._max_unsent_bytes = max_unsent_bytes
        self._tracer = tracer
        self._sessions: set[_Session] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_texts(self) -> int:
        """The number of open texts of all sessions. Thread-safe."""
        return sum(len(session.texts) for session in tuple(self._sessions))

    async def drain(self) -> None:
        """Refuses new texts, ends each session when it has none, and returns when all have
        ended."""
        self.draining = True
        for session in self._sessions:
            session.drain()
        await self._idle.wait()

    # The type stubs allow only generators; grpc.aio also accepts handlers that write themselves.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.DetokenizerSessionRequest], context: Context
    ) -> None:
        texts = OpenTexts(self._vocabulary, self._max_texts)
        session = _Session(texts, self._max_unsent_bytes, self._tracer)
        if self.draining:
            session.drain()
        self._sessions.add(session)
        self._idle.clear()
        reader = asyncio.create_task(session.read(request_iterator))
        writer = asyncio.create_task(session.write(context.write))
        try:
            # When the reader fails, the session ends even if the writer waits for a router that
            # does not read.
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            await writer
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._idle.set()
            reader.cancel()
            writer.cancel()
            texts.end()
            await asyncio.gather(reader, writer, return_exceptions=True)


class _Session:
    """One stream: `read` and `write` run as two tasks until the writer ends or the reader fails."""

    def __init__(self, texts: OpenTexts, max_unsent_bytes: int, tracer: Tracer) -> None:
        self.texts = texts
        self._tracer = tracer
        self._max_unsent_bytes = max_unsent_bytes
        self._draining = False
        self._complete = False
        """Whether the router has sent its last operation."""
        self._made = counter(TEXT_BYTES)
        self._wake = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def drain(self) -> None:
        self._draining = True
        self._wake.set()

    async def read(self, requests: AsyncIterator[pb.DetokenizerSessionRequest]) -> None:
        """Applies operations until the router sends no more. Raises Overloaded when the router
        leaves more than max_unsent_bytes unread.
        """
        burst = 0
        async for request in requests:
            for operation in request.operations:
                burst += self._apply(operation)
                if burst > BURST_TOKENS:
                    burst = 0
                    self._wake.set()
                    await asyncio.sleep(0)
            if self.texts.unsent_bytes > self._max_unsent_bytes:
                raise Overloaded("the session's responses are not read")
            if self.texts.has_news:
                self._wake.set()
        self._complete = True
        self._wake.set()

    async def write(self, send: Callable[[pb.DetokenizerSessionResponse], Awaitable[None]]) -> None:
        """Sends new text and heartbeats. Ends when the router sends no more operations, or when
        draining and no text is open."""
        while True:
            self._wake.clear()
            while news := self.texts.take(MAX_RESPONSE_CHARACTERS):
                response = pb.DetokenizerSessionResponse()
                for entry in news:
                    _fill(response.deltas.add(), entry)
                self._made.inc(sum(len(each.news.text.encode()) for each in news if each.news))
                await send(response)
            if self._complete or (self._draining and not self.texts):
                return
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                await send(pb.DetokenizerSessionResponse(heartbeat=True))

    def _apply(self, operation: pb.DetokenizeOperation) -> int:
        """Applies an operation, and returns its cost in tokens."""
        text_id = operation.text_id
        try:
            match operation.WhichOneof("operation"):
                case "open":
                    return self._open(text_id, operation.open)
                case "append":
                    return self._append(text_id, operation.append)
                case "close":
                    self.texts.close(text_id)
                case _:
                    raise InvalidArgument("is empty or not known", field="operation")
        except BatonError as error:
            self.texts.fail(text_id, error)
        return 1

    def _open(self, text_id: int, message: pb.OpenText) -> int:
        if self._draining:
            raise Unavailable("the detokenizer is leaving")
        token_ids = token_ids_from_bytes(message.token_ids, "token_ids")
        options = DetokenizeOptions(
            stop_strings=tuple(message.stop_strings),
            include_stop_string=message.include_stop_string,
            skip_special_tokens=message.skip_special_tokens,
            kept_special_tokens=_kept(message),
            prompt_tail_ids=token_ids_from_bytes(message.prompt_tail_ids, "prompt_tail_ids"),
            delivered_bytes=message.delivered_bytes,
            min_tokens=message.min_tokens,
        )
        remaining_s = message.remaining_ms / 1000 if message.remaining_ms else math.inf
        self.texts.open(
            text_id,
            options,
            token_ids,
            with_token_texts=message.token_texts,
            deadline=self._clock() + remaining_s,
            span=self._tracer.go_on(tracing.TEXT, parent=TraceContext(message.traceparent)),
        )
        return 1 + len(token_ids) + len(options.prompt_tail_ids)

    def _append(self, text_id: int, message: pb.AppendTokens) -> int:
        token_ids = token_ids_from_bytes(message.token_ids, "token_ids")
        spell = token_ids_from_bytes(message.spell_token_ids, "spell_token_ids")
        self.texts.append(
            text_id,
            message.position,
            token_ids,
            spell=spell,
            last=message.last,
            last_is_stop_token=message.last_is_stop_token,
            now=self._clock(),
        )
        return 1 + len(token_ids) + len(spell)


def _kept(message: pb.OpenText) -> tuple[str, ...]:
    if len(message.kept_special_tokens) > MAX_KEPT_SPECIAL_TOKENS:
        what = f"must be at most {MAX_KEPT_SPECIAL_TOKENS}"
        raise InvalidArgument(what, field="kept_special_tokens")
    return tuple(message.kept_special_tokens)


def _fill(delta: pb.TextDelta, entry: TextNews) -> None:
    """Writes news into an empty message where it lies: protobuf copies one that is made first and
    added then, and takes longer with arguments. There is one for each token."""
    delta.text_id, news = entry.text_id, entry.news
    if news is None:
        assert entry.error is not None
        delta.error.CopyFrom(error_to_proto(entry.error))
        return
    delta.text = news.text
    delta.num_tokens, delta.searched_tokens = news.num_tokens, news.searched_tokens
    delta.end = news.end
    if entry.token_texts:
        delta.token_texts.extend(entry.token_texts)
    if entry.spelled_texts:
        delta.spelled_texts.extend(entry.spelled_texts)
    if news.stop is not None:
        delta.stop.stop_string = news.stop.stop_string
        delta.stop.position = news.stop.position
