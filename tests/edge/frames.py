"""HTTP/2 as frames, from a client that may break every rule.

Clients that keep the rules are httpx's. Here, frames go out as they are made and come in as they
are; only header compression is done, by hpack.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
)

from tests.edge.wire import PATH, PREFACE, Address, connected

Field = tuple[str, str]
HEADER_BYTES = 9
WINDOW = 65_535
"""Of a connection and of a stream, as they begin."""


def fields(
    *more: Field, method: str = "POST", path: str = PATH.decode(), body: bytes | None = None
) -> list[Field]:
    """A request's header fields."""
    pseudo = [
        (":method", method),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
    ]
    named = [("content-type", "application/json")] if method == "POST" else []
    sized = [] if body is None else [("content-length", str(len(body)))]
    return [*pseudo, *named, *sized, *more]


class Outcome(NamedTuple):
    """Of one stream. status: 0 without an answer. ended: the answer is whole."""

    status: int
    body: bytes
    ended: bool


class Frames:
    """A connection that has sent its preface and settings."""

    def __init__(self, connection: socket.socket, settings: Mapping[int, int]) -> None:
        self.socket = connection
        self._encoder, self._decoder = Encoder(), Decoder()
        self._read = b""
        connection.sendall(PREFACE)
        self.send(SettingsFrame(0, settings=dict(settings)))

    def send(self, *frames: Frame) -> None:
        self.socket.sendall(b"".join(frame.serialize() for frame in frames))

    def headers(self, stream: int, named: Sequence[Field], *, end: bool = True) -> HeadersFrame:
        """To be sent next, or never: the compression goes on from it. end: there is no body."""
        flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
        return HeadersFrame(stream, data=self._encoder.encode(named, huffman=False), flags=flags)

    def post(self, stream: int, body: bytes) -> list[Frame]:
        """A whole request. The body fits into one frame."""
        top = self.headers(stream, fields(body=body), end=False)
        return [top, DataFrame(stream, data=body, flags=["END_STREAM"])]

    def received(self) -> Iterator[Frame]:
        """What comes until the connection ends."""
        while True:
            while len(self._read) >= HEADER_BYTES:
                frame, size = Frame.parse_frame_header(memoryview(self._read[:HEADER_BYTES]))
                if len(self._read) < HEADER_BYTES + size:
                    break
                body = self._read[HEADER_BYTES : HEADER_BYTES + size]
                self._read = self._read[HEADER_BYTES + size :]
                frame.parse_body(memoryview(body))
                yield frame
            try:
                more = self.socket.recv(65536)
            except ConnectionError:
                return
            if not more:
                return
            self._read += more

    def outcome(self, stream: int) -> Outcome:
        """Reads until a stream's answer ends, or the stream, or the connection."""
        status, body = 0, b""
        for frame in self.received():
            if isinstance(frame, HeadersFrame | ContinuationFrame | PushPromiseFrame):
                for name, value in self._decoder.decode(frame.data, raw=True):
                    if frame.stream_id == stream and name == b":status":
                        status = int(value)
            elif isinstance(frame, DataFrame) and frame.stream_id == stream:
                body += frame.data
            elif isinstance(frame, RstStreamFrame) and frame.stream_id == stream:
                # After a whole answer, NO_ERROR says that no more of the request is wanted.
                return Outcome(status, body, ended=False)
            elif isinstance(frame, GoAwayFrame) and frame.error_code:
                break
            if frame.stream_id == stream and "END_STREAM" in frame.flags:
                return Outcome(status, body, ended=True)
        return Outcome(status, body, ended=False)

    def is_ended(self) -> bool:
        """Waits until the server ends the connection."""
        for _ in self.received():
            pass
        return True


@contextmanager
def prior_knowledge(
    address: Address, settings: Mapping[int, int] | None = None
) -> Iterator[Frames]:
    with connected(address) as connection:
        yield Frames(connection, settings or {})
