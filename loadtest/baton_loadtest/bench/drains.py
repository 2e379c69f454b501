"""Clients that cost next to nothing, so that what they drain can be driven to its limits.

Each is one connection. They speak as much of HTTP/2 with gRPC, and of HTTP/1.1 with server-sent
events, as it takes to ask for text and to count what comes; they never hold anything back.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter

from baton.v1 import inference_pb2 as pb
from baton.v1 import types_pb2
from baton_loadtest.bench.synthetic import MODEL, WORD

WIDE = 2**31 - 1
"""The largest window of flow control."""

_LITERAL = 0x10
"""A header that is never indexed, with a new name."""


@dataclass(slots=True)
class Drained:
    """One answer so far. Times in seconds: from asking to the first text."""

    asked: float
    first_s: float | None = None
    events: int = 0
    tokens: int = 0
    ended: bool = False

    def hear(self, events: int, words: int) -> None:
        if words and self.first_s is None:
            self.first_s = perf_counter() - self.asked
        self.events += events
        self.tokens += words


@dataclass(frozen=True, slots=True)
class Question:
    """prompt: as `synthetic` reads it. max_tokens: of the answer, which never ends before."""

    prompt: str
    max_tokens: int


Heard = Callable[[], None]
"""Something came."""


class _Frame(IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    WINDOW_UPDATE = 8


_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4


class GrpcDrain(asyncio.Protocol):
    """Calls of `baton.v1.Inference.Generate` on one HTTP/2 connection."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._next_id = 1
        self._answers: dict[int, Drained] = {}
        self._parts: dict[int, bytearray] = {}
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(_Frame.SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, WIDE))
        self._send(_Frame.WINDOW_UPDATE, 0, 0, struct.pack(">I", WIDE - 65535))

    def connection_lost(self, exc: Exception | None) -> None:
        for answer in self._answers.values():
            answer.ended = True
        self._heard()

    def ask(self, question: Question) -> Drained:
        request = pb.GenerateRequest(
            text=question.prompt,
            options=pb.GenerationOptions(
                stop=types_pb2.StopParams(max_tokens=question.max_tokens, ignore_eos=True)
            ),
        ).SerializeToString()
        stream, self._next_id = self._next_id, self._next_id + 2
        answer = self._answers[stream] = Drained(perf_counter())
        self._parts[stream] = bytearray()
        self._send(_Frame.HEADERS, _END_HEADERS, stream, _HEADERS)
        message = struct.pack(">BI", 0, len(request)) + request
        self._send(_Frame.DATA, _END_STREAM, stream, message)
        return answer

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        at = 0
        while len(unread) - at >= 9:
            size = int.from_bytes(unread[at : at + 3], "big")
            end = at + 9 + size
            if len(unread) < end:
                break
            kind, flags = unread[at + 3], unread[at + 4]
            stream = int.from_bytes(unread[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, unread[at + 9 : end])
            at = end
        del unread[:at]
        self._heard()

    def _take(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if kind == _Frame.DATA:
            self._text(stream, payload)
        elif kind in (_Frame.SETTINGS, _Frame.PING) and not flags & _ACK:
            self._send(kind, _ACK, 0, b"" if kind == _Frame.SETTINGS else payload)
        if kind == _Frame.RST_STREAM or (kind <= _Frame.HEADERS and flags & _END_STREAM):
            self._answers[stream].ended = True

    def _text(self, stream: int, payload: bytearray) -> None:
        part = self._parts[stream]
        part += payload
        while len(part) >= 5 and len(part) >= (end := 5 + int.from_bytes(part[1:5], "big")):
            event = pb.GenerateResponse.FromString(bytes(part[5:end])).event
            del part[:end]
            if event.WhichOneof("event") == "delta":
                self._answers[stream].hear(1, len(event.delta.text) // len(WORD))

    def _send(self, kind: int, flags: int, stream: int, payload: bytes | bytearray) -> None:
        head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
        self._transport.write(head + payload)


class SseDrain(asyncio.Protocol):
    """Streams of /v1/completions, one after the other, on one connection."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._answer = Drained(0.0, ended=True)
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._answer.ended = True
        self._heard()

    def ask(self, question: Question) -> Drained:
        body = {
            "model": MODEL.name,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        text = json.dumps(body).encode()
        self._answer = Drained(perf_counter())
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(text), text)
        )
        return self._answer

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        end = self._unread.rfind(b"\n\n") + 2
        if end > 1:
            events = bytes(self._unread[:end])
            del self._unread[:end]
            words = events.count(WORD.encode())
            self._answer.ended |= b"data: [DONE]" in events
            self._answer.hear(events.count(b"data: "), words)
        self._heard()


Drain = GrpcDrain | SseDrain


def _literal(name: bytes, value: bytes) -> bytes:
    return bytes([_LITERAL, len(name)]) + name + bytes([len(value)]) + value


_HEADERS = b"".join(
    _literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/baton.v1.Inference/Generate"),
        (b":authority", b"router"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
