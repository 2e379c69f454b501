"""Senders without an end: the edge's memory stays bounded, and it answers everyone else meanwhile.

The edge runs in a process of its own, whose resident memory is looked at all the time. The bound is
generous: what is looked for grows with what is sent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from itertools import count, repeat

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.edge.edge import EdgeProcess
from tests.edge.frames import WINDOW, Frames, fields, prior_knowledge
from tests.edge.wire import Address, chunk, connected, head, healthy, length, post, prompt

GROWTH_MIB = 48
FLOOD_BYTES = 64 << 20
FLOOD_S = 2.0
"""A flood ends after so many bytes or so long, whichever is first: some are slow to send."""
STALL_S = 0.5
"""Or when nothing of it was taken for so long."""
PIECE = b"x" * 65_536
CHUNKED = b"Transfer-Encoding: chunked"
ENDLESS = prompt("endless", stream=True)


@contextmanager
def neighbour(address: Address) -> Iterator[None]:
    """Within, somebody polite is answered all the time."""
    done, failed = threading.Event(), []

    def ask() -> None:
        while not done.wait(0.01):
            try:
                healthy(address)
            except (AssertionError, OSError) as error:
                failed.append(error)
                return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        done.set()
        asking.join()
    healthy(address)
    assert not failed


class Flood(Enum):
    """How the server bore it."""

    ENDED = auto()
    """It ended the connection."""
    HELD = auto()
    """It takes no more, or more slowly than it was sent."""
    TAKEN = auto()
    """It took all."""


def flood(connection: socket.socket, pieces: Iterable[bytes]) -> Flood:
    until, sent = time.monotonic() + FLOOD_S, 0
    connection.settimeout(STALL_S)
    try:
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
            if sent >= FLOOD_BYTES:
                return Flood.TAKEN
            if time.monotonic() > until:
                return Flood.HELD
    except TimeoutError:
        return Flood.HELD
    except ConnectionError:
        return Flood.ENDED
    return Flood.TAKEN


def request_line() -> Iterator[bytes]:
    yield b"GET /"
    yield from repeat(PIECE)


def one_header() -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: "
    yield from repeat(PIECE)


def headers() -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    yield from (b"X-%d: %b\r\n" % (number, b"y" * 60_000) for number in count())


def empty_lines() -> Iterator[bytes]:
    yield from repeat(b"\r\n" * 32_768)


def trailers() -> Iterator[bytes]:
    yield head(CHUNKED) + chunk(prompt("outer")) + b"0\r\n"
    yield from (b"X-%d: %b\r\n" % (number, b"y" * 60_000) for number in count())


def one_trailer() -> Iterator[bytes]:
    yield head(CHUNKED) + chunk(prompt("outer")) + b"0\r\nX-A: "
    yield from repeat(PIECE)


def short_trailers() -> Iterator[bytes]:
    yield head(CHUNKED) + chunk(prompt("outer")) + b"0\r\n"
    yield from repeat(b"a:\r\n" * 16_384)


def chunk_extension() -> Iterator[bytes]:
    yield head(CHUNKED) + b"5;a="
    yield from repeat(PIECE)


def chunk_extensions() -> Iterator[bytes]:
    yield head(CHUNKED)
    yield from repeat(b"1;%b\r\nx\r\n" % (b"a" * 10_000))


def small_chunks() -> Iterator[bytes]:
    yield head(CHUNKED)
    yield from repeat(b"1\r\nx\r\n" * 10_000)


def long_body() -> Iterator[bytes]:
    yield head(b"Content-Length: 100000000000")
    yield from repeat(PIECE)


def zeroes_of_a_chunk_size() -> Iterator[bytes]:
    yield head(CHUNKED)
    yield from repeat(b"0" * 65_536)


BOUNDED = [request_line, one_header, headers, trailers, one_trailer, short_trailers, long_body]
"""What has a size that a server may be asked to bear, and no more."""
PASSING = [chunk_extension, chunk_extensions, small_chunks, zeroes_of_a_chunk_size, empty_lines]
"""What is passed over as it comes; the time-outs end it."""


OFTEN = (one_header, trailers, short_trailers, empty_lines)
"""Tried by default; the others where there is time."""


@pytest.mark.deep
@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(pieces, marks=() if pieces in OFTEN else pytest.mark.slow)
        for pieces in (*BOUNDED, *PASSING)
    ],
)
def test_no_request_is_endless(edge: EdgeProcess, pieces: Callable[[], Iterator[bytes]]) -> None:
    with (
        edge.watched(GROWTH_MIB),
        neighbour(edge.host_and_port),
        connected(edge.host_and_port) as connection,
    ):
        borne = flood(connection, pieces())
    assert borne is not Flood.TAKEN or pieces in PASSING
    assert edge.open_streams() == 0


def test_pipelined_requests_of_one_who_reads_nothing(edge: EdgeProcess) -> None:
    with (
        edge.watched(GROWTH_MIB),
        neighbour(edge.host_and_port),
        connected(edge.host_and_port) as connection,
    ):
        assert flood(connection, repeat(post("outer") * 200)) is not Flood.TAKEN


@contextmanager
def flooding(edge: EdgeProcess, *, reads: bool = True) -> Iterator[Frames]:
    """An HTTP/2 client whose first stream was answered, while its neighbour is and memory is
    bounded. reads: what comes is taken, by a thread."""
    with (
        edge.watched(GROWTH_MIB),
        neighbour(edge.host_and_port),
        prior_knowledge(edge.host_and_port) as client,
    ):
        client.send(*client.post(1, prompt("outer")))
        assert client.outcome(1).status == 200
        reading = threading.Thread(target=_take_all, args=(client.socket,))
        if reads:
            reading.start()
        try:
            yield client
        finally:
            with suppress(OSError):  # The server may have ended it.
                client.socket.shutdown(socket.SHUT_RDWR)
            if reads:
                reading.join()


def _take_all(connection: socket.socket) -> None:
    """Until its end; a sender that is held meanwhile is no end."""
    with suppress(ConnectionError):
        while True:
            with suppress(TimeoutError):
                if not connection.recv(1 << 20):
                    return


def test_rapid_reset(edge: EdgeProcess) -> None:
    """Ten thousand requests that are given up as they are made; each counts for nothing."""

    def resets(client: Frames) -> Iterator[bytes]:
        for stream in range(3, 20_003, 2):
            frames = (*client.post(stream, ENDLESS), RstStreamFrame(stream, 8))
            yield b"".join(frame.serialize() for frame in frames)

    with flooding(edge) as client:
        flood(client.socket, resets(client))
        edge.wait_for_streams(0)


def test_continuation_without_an_end(edge: EdgeProcess) -> None:
    """One field after the other, each with a name of its own."""

    def frames(client: Frames) -> Iterator[bytes]:
        yield HeadersFrame(
            3, data=client.headers(3, fields()).data, flags=["END_STREAM"]
        ).serialize()
        value = b"y" * 16_000
        field = b"\x00\x03x-a\x7f" + _integer(len(value) - 127) + value
        yield from repeat(ContinuationFrame(3, data=field).serialize())

    with flooding(edge) as client:
        assert flood(client.socket, frames(client)) is Flood.ENDED


def test_empty_continuations(edge: EdgeProcess) -> None:
    def frames(client: Frames) -> Iterator[bytes]:
        yield HeadersFrame(3, data=client.headers(3, fields()).data).serialize()
        yield from repeat(ContinuationFrame(3).serialize() * 5000)

    with flooding(edge) as client:
        assert flood(client.socket, frames(client)) is Flood.ENDED


def test_headers_that_unpack_to_a_lot(edge: EdgeProcess) -> None:
    """A field of 4 000 bytes in the table, named 16 000 times by a byte each, on many streams."""

    def frames(client: Frames) -> Iterator[bytes]:
        value = b"z" * 4000
        entry = b"\x40\x01b\x7f" + _integer(len(value) - 127) + value
        block = client.headers(3, fields()).data + entry
        yield HeadersFrame(3, data=block, flags=["END_HEADERS", "END_STREAM"]).serialize()
        for stream in range(5, 205, 2):
            block = client.headers(stream, fields()).data
            block += b"\xbe" * (16_384 - len(block))
            yield HeadersFrame(stream, data=block, flags=["END_HEADERS", "END_STREAM"]).serialize()

    with flooding(edge) as client:
        flood(client.socket, frames(client))


def _integer(rest: int) -> bytes:
    """What follows a prefix full of ones (RFC 7541 5.1)."""
    out = b""
    while rest >= 128:
        out += bytes([rest % 128 + 128])
        rest //= 128
    return out + bytes([rest])


CONTROL = {
    "settings": SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 70_000}).serialize(),
    "ping": PingFrame(0, opaque_data=b"12345678").serialize(),
    "window": WindowUpdateFrame(0, window_increment=1).serialize(),
    "priority": PriorityFrame(7, depends_on=0, stream_weight=1).serialize(),
    "unknown": b"\x00\x00\x00\xbb\x00\x00\x00\x00\x00",
}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("settings", True),
        ("ping", False),
        *(
            pytest.param(name, reads, marks=pytest.mark.slow)
            for name, reads in [
                ("settings", False),
                *((name, True) for name in CONTROL if name != "settings"),
            ]
        ),
    ],
)
def test_control_frames_without_an_end(edge: EdgeProcess, name: str, reads: bool) -> None:
    """What acknowledges them is not kept for a client that does not read it."""
    with flooding(edge, reads=reads) as client:
        flood(client.socket, repeat(CONTROL[name] * 2000))


@pytest.mark.slow
def test_empty_data_frames(edge: EdgeProcess) -> None:
    def frames(client: Frames) -> Iterator[bytes]:
        yield client.headers(3, fields(), end=False).serialize()
        yield from repeat(DataFrame(3).serialize() * 5000)

    with flooding(edge) as client:
        flood(client.socket, frames(client))


@pytest.mark.deep
@pytest.mark.parametrize("version", ["http1", "http2-window", "http2-socket"])
def test_answers_that_nobody_takes(edge: EdgeProcess, version: str) -> None:
    """Fifty endless ones: of as many connections, or streams of one that gives them no window, or
    of one that gives them any window and does not read."""
    with edge.watched(GROWTH_MIB), neighbour(edge.host_and_port), ExitStack() as stack:
        if version == "http1":
            for _ in range(50):
                connection = stack.enter_context(connected(edge.host_and_port))
                connection.sendall(head(length(ENDLESS)) + ENDLESS)
        else:
            window = 0 if version == "http2-window" else (1 << 31) - 1
            settings = {SettingsFrame.INITIAL_WINDOW_SIZE: window}
            client = stack.enter_context(prior_knowledge(edge.host_and_port, settings))
            if window:
                client.send(WindowUpdateFrame(0, window_increment=window - WINDOW))
            for stream in range(1, 101, 2):
                client.send(*client.post(stream, ENDLESS))
        edge.wait_for_streams(50)
        # Now the edge could grow.
        time.sleep(1.0)
    edge.wait_for_streams(0)


def test_connections_leave_nothing_behind(edge: EdgeProcess) -> None:
    for _ in range(200):
        healthy(edge.host_and_port)
    with edge.watched(8):
        for _ in range(1000):
            healthy(edge.host_and_port)
