"""The stream between this router and a detokenizer, shared by the texts of all requests.

It takes new tokens from a text only when the stream has room, so nothing queues here. A break loses
the texts' state at the worker: each text fails here, and its owner opens it again elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol

import grpc

from batonlm.core.errors import BatonError, Unavailable
from batonlm.router.workers.shared_stream import Broadcast, SharedStream
from batonlm.rpc.convert import error_from_proto, to_ms
from batonlm.rpc.loop import Clock
from batonlm.v1.detokenizer_pb2 import (
    AppendTokens,
    DetokenizeOperation,
    DetokenizerSessionRequest,
    DetokenizerSessionResponse,
    OpenText,
    TextDelta,
)
from batonlm.v1.detokenizer_pb2_grpc import DetokenizerStub

MAX_OPERATIONS = 256
"""Most operations per message: many small texts share one, and none waits long for the others."""


class TextSource(Protocol):
    """A text as the session sees it. No method blocks."""

    def open_text(self, text: OpenText) -> None:
        """Fills in the beginning of the text: its tokens so far and the length of the delivered
        text."""

    def append_tokens(self, add: Callable[[], AppendTokens]) -> None:
        """Fills in what is new since `open_text`. add: creates the message; call it only when there
        is something to send."""

    def on_delta(self, delta: TextDelta) -> None:
        """The detokenizer has more of the text."""

    def on_lost(self, error: BatonError) -> None:
        """The session has lost this text."""


class DetokenizerSession(SharedStream[DetokenizerSessionRequest, DetokenizerSessionResponse]):
    """The session of one detokenizer. The outbox holds at most one entry per text."""

    def __init__(self, channel: grpc.aio.Channel, changed: Broadcast, awake: Clock) -> None:
        super().__init__(changed, awake)
        self._stub = DetokenizerStub(channel)
        self._ids = count(1)
        self._sources: dict[int, TextSource] = {}
        self._unopened: dict[int, float] = {}
        self._dirty: dict[int, None] = {}
        self._closing: list[int] = []

    @property
    def num_texts(self) -> int:
        return len(self._sources)

    def open(self, source: TextSource, deadline: float) -> int:
        """Begins a text; returns its id, which is valid until the text ends, is lost or is closed.

        The text is sent to the worker when it is first touched: before there are tokens that is not
        needed, and it must not delay the first token. deadline: of its request, on the running
        loop's clock.
        """
        text_id = next(self._ids)
        self._sources[text_id] = source
        self._unopened[text_id] = deadline
        return text_id

    def touch(self, text_id: int) -> None:
        """The text has more tokens to send."""
        if text_id in self._sources:
            self._dirty[text_id] = None
            self.wake()

    def close(self, text_id: int) -> None:
        """Ends a text. Unknown ids are ignored."""
        if text_id not in self._sources:
            return
        self._forget(text_id)
        if self._unopened.pop(text_id, None) is None:
            self._closing.append(text_id)
            self.wake()

    def send_away(self) -> None:
        """Fails every text here, so that its owner opens it again elsewhere."""
        for text_id, source in list(self._sources.items()):
            self.close(text_id)
            source.on_lost(Unavailable("A worker of this request is leaving."))

    def connect(
        self,
    ) -> grpc.aio.StreamStreamCall[DetokenizerSessionRequest, DetokenizerSessionResponse]:
        return self._stub.Session()

    def greeting(self) -> Sequence[DetokenizerSessionRequest]:
        return ()

    def outgoing(self) -> Sequence[DetokenizerSessionRequest]:
        closing, self._closing = self._closing, []
        dirty, self._dirty = self._dirty, {}
        batch = _Batch()
        for text_id in closing:
            batch.add(text_id).close.SetInParent()
        for text_id in dirty:
            source = self._sources[text_id]
            if text_id in self._unopened:
                opening = batch.add(text_id).open
                opening.SetInParent()
                source.open_text(opening)
                left_s = self._unopened.pop(text_id) - asyncio.get_running_loop().time()
                opening.remaining_ms = to_ms(left_s)
            source.append_tokens(partial(batch.append, text_id))
        return batch.messages

    def incoming(self, message: DetokenizerSessionResponse) -> None:
        sources = self._sources
        for delta in message.deltas:
            text_id = delta.text_id
            source = sources.get(text_id)
            if source is None:
                continue
            if delta.HasField("error"):
                self._forget(text_id)
                source.on_lost(error_from_proto(delta.error))
                continue
            source.on_delta(delta)
            if delta.end:
                self._forget(text_id)

    def lose(self, error: BatonError) -> None:
        sources, self._sources = self._sources, {}
        self._unopened.clear()
        self._dirty.clear()
        self._closing.clear()
        for source in sources.values():
            source.on_lost(error)

    def _forget(self, text_id: int) -> None:
        self._sources.pop(text_id, None)
        self._dirty.pop(text_id, None)


class _Batch:
    """Operations in messages of at most MAX_OPERATIONS. They are filled in place, because protobuf
    copies a message that is created first and added afterwards, and there is one for every token.
    """

    def __init__(self) -> None:
        self.messages: list[DetokenizerSessionRequest] = []
        self._left = 0

    def add(self, text_id: int) -> DetokenizeOperation:
        if not self._left:
            self.messages.append(DetokenizerSessionRequest())
            self._left = MAX_OPERATIONS
        self._left -= 1
        operation = self.messages[-1].operations.add()
        operation.text_id = text_id
        return operation

    def append(self, text_id: int) -> AppendTokens:
        return self.add(text_id).append
