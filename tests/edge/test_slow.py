"""Clients that are slow, stand still, go away or stay for ever; and the end of the edge itself.

What has to come is waited for, with a generous bound; how long it took is not looked at. Cases that
wait for the same time-out wait together.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, count, repeat

import pytest
from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

from batonlm.router.api.http.server import HttpServer
from tests.edge.conftest import QUICK, SecureEdge
from tests.edge.edge import LIVENESS_S, EdgeProcess, Lasting, serving
from tests.edge.frames import Frames, fields, prior_knowledge
from tests.edge.wire import (
    HEALTH,
    PREFACE,
    Address,
    answers_of,
    chunk,
    connected,
    head,
    healthy,
    length,
    prompt,
    taken_apart,
)

DRIP_S = 0.1
OUTER = prompt("outer")
STREAMED = prompt("outer", stream=True)
ENDLESS = prompt("endless", stream=True)
SILENT = prompt("silent", stream=True)
CHUNKED = b"Transfer-Encoding: chunked"
NO_WINDOW = {SettingsFrame.INITIAL_WINDOW_SIZE: 0}
PING = PingFrame(0, opaque_data=b"12345678").serialize()
START = PREFACE + SettingsFrame(0).serialize()


Drops = Callable[[], Iterable[bytes]]


def dripped(address: Address, drops: Iterable[bytes], *, greets: bool = False) -> bytes:
    """What comes over a connection until the server ends it. Drop by drop something is sent, and
    then nothing, for ever. greets: a request is answered first.
    """
    with connected(address) as connection:
        if greets:
            connection.sendall(HEALTH)
            assert answers_of(connection, 1).statuses == (200,)
        data, until = b"", time.monotonic() + LIVENESS_S
        for drop in chain(drops, repeat(b"")):
            assert time.monotonic() < until, "the connection is still open"
            with suppress(ConnectionError):
                connection.sendall(drop)
            more, ended = taken_within(connection, DRIP_S)
            data += more
            if ended:
                break
    return data


def taken_within(connection: socket.socket, seconds: float) -> tuple[bytes, bool]:
    """What comes so soon, and whether that is the end."""
    data, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            more = connection.recv(65536)
        except TimeoutError:
            break
        except ConnectionError:
            return data, True
        if not more:
            return data, True
        data += more
    return data, False


def singly(data: bytes) -> Iterator[bytes]:
    return (data[place : place + 1] for place in range(len(data)))


def all_ended(address: Address, cases: dict[str, Drops], *, greets: bool) -> dict[str, bytes]:
    """All cases at once, and what came over each connection."""
    with ThreadPoolExecutor(len(cases)) as pool:
        waiting = {
            name: pool.submit(dripped, address, drops(), greets=greets)
            for name, drops in cases.items()
        }
        still_open = {name for name, case in waiting.items() if case.exception()}
    assert not still_open
    healthy(address)
    return {name: case.result() for name, case in waiting.items()}


def endless_fields() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    yield from (b"X-%d: a\r\n" % number for number in count())


HALF_A_BLOCK = START + HeadersFrame(1, data=b"\x82").serialize()
FIRST_HEADS: dict[str, Drops] = {
    "nothing": list,
    "bytes": lambda: singly(HEALTH[:-1]),
    "fields": endless_fields,
    "empty-lines": lambda: repeat(b"\r\n"),
    "half-a-preface": lambda: singly(PREFACE[:10]),
    "preface": lambda: [PREFACE],
    "settings": lambda: [START],
    "settings-again": lambda: chain([START], repeat(SettingsFrame(0).serialize())),
    "pings": lambda: chain([START], repeat(PING)),
    "half-a-block": lambda: [HALF_A_BLOCK],
    "half-a-block-bytes": lambda: chain([HALF_A_BLOCK], singly(b"\x00\x00\xff\x09" + bytes(250))),
}


@pytest.mark.deep
def test_a_first_request_has_to_come(quick: EdgeProcess) -> None:
    """Neither silence nor a byte from time to time keeps a connection."""
    said = all_ended(quick.host_and_port, FIRST_HEADS, greets=False)
    for name in ("nothing", "bytes", "fields", "empty-lines"):
        assert taken_apart(said[name]).statuses in ((), (400,), (408,))
    assert quick.asked() == []


NEXT_HEADS: dict[str, Drops] = {
    "nothing": list,
    "bytes": lambda: singly(HEALTH[:-1]),
    "fields": endless_fields,
    "empty-lines": lambda: repeat(b"\r\n"),
    "one-empty-line": lambda: [b"\r\n"],
    "half-a-line": lambda: [b"GE"],
}


def test_a_connection_is_not_kept_for_ever_between_requests(quick: EdgeProcess) -> None:
    said = all_ended(quick.host_and_port, NEXT_HEADS, greets=True)
    assert all(taken_apart(data).statuses in ((), (400,), (408,)) for data in said.values())


@pytest.mark.deep
def test_http2_is_not_kept_for_ever_between_requests(quick: EdgeProcess) -> None:
    def idle(keep: Iterable[bytes]) -> None:
        with prior_knowledge(quick.host_and_port) as client:
            client.send(*client.post(1, OUTER))
            assert client.outcome(1).status == 200
            until = time.monotonic() + LIVENESS_S
            for drop in chain(keep, repeat(b"")):
                assert time.monotonic() < until, "the connection is still open"
                with suppress(ConnectionError):
                    client.socket.sendall(drop)
                if taken_within(client.socket, DRIP_S)[1]:
                    break

    half = HeadersFrame(3, data=b"\x82").serialize()
    with ThreadPoolExecutor() as pool:
        list(pool.map(idle, ([], repeat(PING), [half])))


def one_chunk_after_the_other() -> Iterator[bytes]:
    yield head(CHUNKED)
    yield from repeat(chunk(b" "))


def trailers() -> Iterator[bytes]:
    yield head(CHUNKED) + chunk(OUTER) + b"0\r\n"
    yield from (b"X-%d: a\r\n" % number for number in count())


TOP = head(b"Content-Length: 10000")
BODIES: dict[str, Drops] = {
    "nothing": lambda: [TOP],
    "expected": lambda: [head(b"Content-Length: 10000", b"Expect: 100-continue")],
    "bytes": lambda: chain([TOP], repeat(b" ")),
    "chunks": one_chunk_after_the_other,
    "chunk-size": lambda: chain([head(CHUNKED)], repeat(b"0")),
    "chunk-extension": lambda: chain([head(CHUNKED) + b"5;"], repeat(b"a")),
    "trailers": trailers,
}


def test_a_body_has_to_come(quick: EdgeProcess) -> None:
    for data in all_ended(quick.host_and_port, BODIES, greets=True).values():
        assert taken_apart(data).statuses in ((408,), (400,), ())
    assert quick.asked() == []


def unread(top: bytes) -> Drops:
    return lambda: chain([top], repeat(b" "))


UNREAD: dict[str, Drops] = {
    "health": unread(head(b"Content-Length: 10000", line=b"GET /health HTTP/1.1")),
    "no-route": unread(head(b"Content-Length: 10000", line=b"POST /nowhere HTTP/1.1")),
    "too-large": unread(head(b"Content-Length: 100000000")),
    "wrong-type": unread(TOP.replace(b"application/json", b"text/plain")),
}


@pytest.mark.deep
def test_what_nobody_reads_has_an_end(quick: EdgeProcess) -> None:
    """A body whose request is answered already, or will be without it."""
    said = all_ended(quick.host_and_port, UNREAD, greets=False)
    assert all(len(taken_apart(data).answers) <= 1 for data in said.values())


@pytest.mark.deep
def test_http2_bodies_have_to_come(quick: EdgeProcess) -> None:
    """One stream's does not keep the others from being answered."""
    with prior_knowledge(quick.host_and_port) as client:
        client.send(client.headers(1, fields(), end=False), DataFrame(1, data=b" "))
        client.send(*client.post(3, OUTER))
        assert client.outcome(3).status == 200
        outcome = client.outcome(1)
    assert outcome.status in (0, 400, 408)
    assert [each.prompt for each in quick.asked()] == ["outer"]


@pytest.mark.deep
def test_a_handshake_has_to_come(secure: SecureEdge) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    cases: list[Iterable[bytes]] = [[], [hello], singly(hello + bytes(400)), [HEALTH]]
    address = secure.process.host_and_port
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda drops: dripped(address, drops), cases))
    with (
        connected(address) as connection,
        secure.trusting.wrap_socket(connection, server_hostname=address[0]) as encrypted,
    ):
        encrypted.sendall(HEALTH)
        assert answers_of(encrypted, 1).statuses == (200,)


def ask(edge: EdgeProcess, body: bytes, *, window: int | None = None) -> socket.socket:
    """A connection that has asked for an answer, and has as little room for it as there can be."""
    with ExitStack() as unless_asked:
        connection = unless_asked.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(LIVENESS_S)
        connection.connect(edge.host_and_port)
        if window is None:
            connection.sendall(head(length(body)) + body)
        else:
            client = Frames(connection, {SettingsFrame.INITIAL_WINDOW_SIZE: window})
            client.send(*client.post(1, body))
        unless_asked.pop_all()
    return connection


WINDOWS = {"http1": None, "http2-no-window": 0, "http2-small": 1000, "http2-open": (1 << 31) - 1}


@pytest.mark.deep
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_who_takes_nothing_is_cut(quick: EdgeProcess, window: int | None) -> None:
    """In mid-stream; nobody goes on with an answer for it."""
    with ask(quick, ENDLESS, window=window) as connection:
        quick.wait_for_streams(1)
        quick.wait_for_streams(0)
        with suppress(ConnectionError):
            while connection.recv(65536):
                pass


@pytest.mark.deep
@pytest.mark.parametrize("window", [None, 0], ids=["http1", "http2-no-window"])
def test_who_takes_nothing_of_a_finished_answer_is_cut(
    quick: EdgeProcess, window: int | None
) -> None:
    """It is larger than the client's room and smaller than the edge's, which is done with it."""
    quick.wait_for_no_connections()
    with ask(quick, prompt("x" * 2000, max_tokens=3000, n=8), window=window):
        while not quick.asked():
            time.sleep(0.01)
        quick.wait_for_no_connections()


def closes(connection: socket.socket) -> None:
    connection.close()


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("go", [closes, resets])
@pytest.mark.parametrize("body", [SILENT, prompt("silent"), ENDLESS], ids=["sse", "json", "busy"])
@pytest.mark.parametrize("window", [None, 60_000], ids=["http1", "http2"])
def test_going_is_seen(
    edge: EdgeProcess, window: int | None, body: bytes, go: Callable[[socket.socket], None]
) -> None:
    """Whatever the answer waits for: the next token, its end, or the client itself."""
    connection = ask(edge, body, window=window)
    try:
        edge.wait_for_streams(1)
    finally:
        go(connection)
    edge.wait_for_streams(0)


def test_going_is_seen_of_one_stream_alone(edge: EdgeProcess) -> None:
    with prior_knowledge(edge.host_and_port) as client:
        for stream in (1, 3, 5):
            client.send(*client.post(stream, SILENT))
        edge.wait_for_streams(3)
        client.send(RstStreamFrame(3, 8))
        edge.wait_for_streams(2)
        client.send(*client.post(7, OUTER))
        assert client.outcome(7).status == 200
    edge.wait_for_streams(0)


@pytest.mark.deep
@pytest.mark.parametrize("go", [closes, resets])
@pytest.mark.parametrize("body", [SILENT, prompt("silent")], ids=["sse", "json"])
def test_going_is_seen_behind_a_pipelined_request(
    edge: EdgeProcess, body: bytes, go: Callable[[socket.socket], None]
) -> None:
    connection = ask(edge, body)
    try:
        edge.wait_for_streams(1)
        connection.sendall(HEALTH * 3)
    finally:
        go(connection)
    edge.wait_for_streams(0)


def test_connections_of_an_address_are_bounded(quick: EdgeProcess) -> None:
    limit = int(QUICK["max_per_address"])
    with ExitStack() as held:
        begun = 0
        for _ in range(limit + 10):
            connection = held.enter_context(connected(quick.host_and_port))
            with suppress(ConnectionError):  # One that is refused at once.
                connection.sendall(head(length(SILENT)) + SILENT)
                begun += connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        # Some that went before may still count.
        assert 1 <= begun <= limit
        with socket.create_connection(quick.host_and_port, LIVENESS_S, ("127.0.0.2", 0)) as other:
            other.sendall(HEALTH)
            assert answers_of(other, 1).statuses == (200,)
    quick.wait_for_streams(0)
    answered_in_the_end(quick)


@pytest.mark.deep
def test_all_connections_are_bounded(quick: EdgeProcess) -> None:
    """Whoever holds them, silently and from many addresses, does not keep others out for ever."""
    limit = int(QUICK["max_connections"])
    with ExitStack() as held:
        for number in range(3 * limit):
            connection = held.enter_context(socket.socket())
            connection.bind((f"127.0.0.{2 + number // 10}", 0))
            connection.settimeout(LIVENESS_S)
            connection.connect(quick.host_and_port)
        assert quick.connections() <= limit + 8  # Some may be on their way out.
        answered_in_the_end(quick)


def answered_in_the_end(edge: EdgeProcess) -> None:
    """Maybe after refusals, of which each says that there is no room."""
    until = time.monotonic() + LIVENESS_S
    statuses: tuple[int, ...] = ()
    while statuses != (200,):
        assert time.monotonic() < until and statuses in ((), (429,), (503,))
        with suppress(ConnectionError), connected(edge.host_and_port) as connection:
            connection.sendall(HEALTH)
            statuses = answers_of(connection, 1).statuses
        time.sleep(0.01)


def address_of(server: HttpServer) -> Address:
    host, port = server.address.rsplit(":", 1)
    return host, int(port)


async def test_the_edge_ends_when_its_answers_have() -> None:
    """Running ones end whole, idle connections end, and nobody is let in any more."""
    frontend = Lasting(hold=True)

    def stream_http1() -> bytes:
        with connected(address) as connection:
            connection.sendall(head(length(STREAMED)) + STREAMED)
            return answers_of(connection, 1).answers[0].body

    def stream_http2() -> bytes:
        with prior_knowledge(address) as client:
            client.send(*client.post(1, STREAMED))
            outcome = client.outcome(1)
            assert outcome.ended
            return outcome.body

    def idle_http1() -> bytes:
        with connected(address) as connection:
            connection.sendall(HEALTH)
            assert answers_of(connection, 1).statuses == (200,)
            idle.release()
            return connection.recv(100)

    def idle_http2() -> bytes:
        with prior_knowledge(address) as client:
            client.send(client.headers(1, fields(method="GET", path="/health")))
            assert client.outcome(1).status == 200
            idle.release()
            assert client.is_ended()
            return b""

    idle = threading.Semaphore(0)
    async with serving(frontend) as server:
        address = address_of(server)
        running = [
            asyncio.ensure_future(asyncio.to_thread(client))
            for client in (stream_http1, stream_http2, idle_http1, idle_http2)
        ]
        async with asyncio.timeout(LIVENESS_S):
            while frontend.open_streams < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for _ in range(2):
                await asyncio.to_thread(idle.acquire, timeout=LIVENESS_S)
        closing = asyncio.ensure_future(server.close(grace_s=2 * LIVENESS_S))
        async with asyncio.timeout(LIVENESS_S):
            while await asyncio.to_thread(_is_open, address):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        frontend.release.set()
        bodies = await asyncio.wait_for(asyncio.gather(*running), LIVENESS_S)
        await asyncio.wait_for(closing, LIVENESS_S)
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies[:2])
    assert bodies[2:] == [b"", b""]
    assert frontend.open_streams == 0


def _is_open(address: Address) -> bool:
    try:
        socket.create_connection(address, LIVENESS_S).close()
    except ConnectionError:
        return False
    return True


@pytest.mark.deep
@pytest.mark.parametrize("body", [SILENT, ENDLESS], ids=["waiting", "not-read"])
@pytest.mark.parametrize("version", [1, 2])
async def test_the_edge_ends_although_an_answer_does_not(version: int, body: bytes) -> None:
    frontend = Lasting()
    async with serving(frontend) as server:
        with ExitStack() as held:
            connection = held.enter_context(connected(address_of(server)))
            if version == 1:
                connection.sendall(head(length(body)) + body)
            else:
                client = Frames(connection, NO_WINDOW)
                client.send(*client.post(1, body))
            await asyncio.wait_for(frontend.started.wait(), LIVENESS_S)
            await asyncio.wait_for(server.close(grace_s=0.1), LIVENESS_S)
            assert frontend.open_streams == 0
            with suppress(ConnectionError):
                while connection.recv(65536):
                    pass
