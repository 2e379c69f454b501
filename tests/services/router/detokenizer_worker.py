"""The scripted detokenizer: a byte a token, stop strings, and silence on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import BatonError, Cancelled
from baton.rpc.convert import error_to_proto, token_ids_from_bytes
from baton.rpc.server import Service
from baton.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from tests.services.router import language
from tests.services.router.workers import HEARTBEAT_S, Context, FakeWorker


@dataclass
class _Text:
    """One text at the fake detokenizer: all of it, and how much went out."""

    opening: detokenizer_pb2.OpenText
    token_ids: list[int] = field(default_factory=list)
    sent: int = 0
    spelled: list[bytes] = field(default_factory=list)
    last: bool = False


class FakeDetokenizer(FakeWorker, detokenizer_pb2_grpc.DetokenizerServicer):
    """`talking`: cleared, tokens are taken and nothing is answered."""

    role = "detokenizer"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.talking = asyncio.Event()
        self.talking.set()
        self.texts: dict[int, _Text] = {}
        self.openings: list[detokenizer_pb2.OpenText] = []
        self.fail_next: list[BatonError] = []

    def service(self) -> Service:
        return Service(
            "baton.v1.Detokenizer",
            lambda server: detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(self, server),
        )

    async def Session(
        self,
        request_iterator: AsyncIterator[detokenizer_pb2.DetokenizerSessionRequest],
        context: Context,
    ) -> AsyncIterator[detokenizer_pb2.DetokenizerSessionResponse]:
        self.texts.clear()
        dirty: dict[int, None] = {}
        reader = asyncio.create_task(self._read(request_iterator, dirty))
        yield detokenizer_pb2.DetokenizerSessionResponse(heartbeat=True)
        silent_since = asyncio.get_running_loop().time()
        try:
            while not reader.done():
                await asyncio.sleep(0.001)
                now = asyncio.get_running_loop().time()
                if dirty and self.talking.is_set():
                    taken, silent_since = list(dirty), now
                    dirty.clear()
                    yield detokenizer_pb2.DetokenizerSessionResponse(
                        deltas=[self._delta(text_id) for text_id in taken if text_id in self.texts]
                    )
                elif now - silent_since > HEARTBEAT_S:
                    silent_since = now
                    yield detokenizer_pb2.DetokenizerSessionResponse(heartbeat=True)
            reader.result()
        finally:
            reader.cancel()

    async def _read(
        self,
        requests: AsyncIterator[detokenizer_pb2.DetokenizerSessionRequest],
        dirty: dict[int, None],
    ) -> None:
        async for request in requests:
            for operation in request.operations:
                text_id = operation.text_id
                match operation.WhichOneof("operation"):
                    case "open":
                        self.openings.append(operation.open)
                        ids = token_ids_from_bytes(operation.open.token_ids, "open.token_ids")
                        self.texts[text_id] = _Text(operation.open, list(ids))
                        dirty[text_id] = None
                    case "append" if text_id in self.texts:
                        self._append(self.texts[text_id], operation.append)
                        dirty[text_id] = None
                    case "close":
                        self.texts.pop(text_id, None)

    def _append(self, text: _Text, append: detokenizer_pb2.AppendTokens) -> None:
        if append.position != len(text.token_ids):
            raise Cancelled("tokens do not follow those so far")
        ids = token_ids_from_bytes(append.token_ids, "append.token_ids")
        text.token_ids += ids
        text.last = append.last
        for token in token_ids_from_bytes(append.spell_token_ids, "append.spell_token_ids"):
            text.spelled.append(bytes([token]) if token < 256 else b"<end>")

    def _delta(self, text_id: int) -> detokenizer_pb2.TextDelta:
        if self.fail_next:
            del self.texts[text_id]
            error = error_to_proto(self.fail_next.pop(0))
            return detokenizer_pb2.TextDelta(text_id=text_id, error=error)
        text = self.texts[text_id]
        spelled, text.spelled = text.spelled, []
        whole = language.text_of(text.token_ids)
        delta = detokenizer_pb2.TextDelta(text_id=text_id, spelled_texts=spelled)
        end = len(whole)
        found = _first_stop(whole, text.opening.stop_strings)
        if found is not None:
            stop, start = found
            delta.stop.stop_string = stop
            delta.stop.position = start + len(stop) - 1
            end = start + len(stop) if text.opening.include_stop_string else start
        elif not text.last:
            end -= _held_back(whole, text.opening.stop_strings)
        delta.end = text.last or found is not None
        start = max(text.sent, text.opening.delivered_bytes)
        delta.text = whole[start:end]
        text.sent = max(start, end)
        delta.num_tokens = len(text.token_ids) if delta.end else min(end, len(text.token_ids))
        delta.searched_tokens = len(text.token_ids)
        if delta.end:
            del self.texts[text_id]
        return delta


def _first_stop(text: str, stops: Iterable[str]) -> tuple[str, int] | None:
    """The stop string that is complete first."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, stop = min(found)
    return stop, end - len(stop)


def _held_back(text: str, stops: Iterable[str]) -> int:
    """How much of the end could be the beginning of a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )
