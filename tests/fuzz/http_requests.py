"""Raw HTTP/1.1: requests as bytes, in good order or not, and reading the answers to them."""

from __future__ import annotations

import errno
import http.client
import io
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.fuzz.mutations import damages

ANSWERED_S = 120.0
"""A bound for liveness: whoever sent everything, or ended, is answered or cut."""

METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE", b"X" * 99)
HEADERS: tuple[bytes, ...] = (
    b"Content-Type: application/json",
    b"Content-Type: text/plain",
    b"Content-Type: multipart/form-data; boundary=x",
    b"Content-Type: \xff\xfe",
    b"Content-Encoding: gzip",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Expect: 100-continue",
    b"Authorization: Bearer \xff\0x",
    b"Authorization: " + b"x" * 5000,
    b"X-Request-Id: a\tb",
    b"Host: ",
    b"Host: other",
    b"Connection: upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Cookie: " + b"a=b;" * 6000,
    b": no name",
    b"No-Colon",
    b" folded: x",
    b"Traceparent: 00-zz-zz-00",
    b"Accept-Encoding: " + b"gzip," * 200,
)


@dataclass(frozen=True)
class Sent:
    """One connection's bytes. whole: a single request in good order, which must be answered."""

    data: bytes
    whole: bool


@dataclass(frozen=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def request(method: bytes, path: str, headers: Sequence[bytes], body: bytes) -> bytes:
    """headers: without Host, Connection and Content-Length, which are added."""
    length = b"Content-Length: %d" % len(body)
    lines = (b"Host: localhost", b"Connection: close", length, *headers)
    return (
        b"%s %s HTTP/1.1\r\n" % (method, path.encode()) + b"\r\n".join(lines) + b"\r\n\r\n" + body
    )


def requests(paths: Sequence[str], bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[Sent]:
    """bodies: what a body of these routes may look like."""
    path = st.sampled_from(
        (*paths, *paths, *paths, "/", "*", "//", "/v1/../health", "/" + "x" * 9000, "/%00%ff?a=%zz")
    )
    odd = st.lists(st.sampled_from(HEADERS), max_size=3)
    body = bodies | st.builds(lambda one, damage: damage(one), bodies, damages())
    plain = st.builds(
        lambda where, what: Sent(request(b"POST", where, HEADERS[:1], what), whole=True),
        st.sampled_from(paths),
        body,
    )
    other = st.builds(request, st.sampled_from(METHODS), path, odd, body)
    chunked = st.builds(_chunked, st.sampled_from(paths), body, st.sampled_from(_SIZES))
    broken = st.builds(lambda one, damage: damage(one), other | chunked, damages())
    twice = st.builds(lambda one, two: one + two, other, other)
    bad = st.one_of(other, chunked, broken, twice, st.binary(max_size=40))
    return plain | plain | bad.map(lambda data: Sent(data, whole=False))


def exchange(address: tuple[str, int], sent: Sent) -> list[Answer]:
    """What came back on one connection. Fails when it stays open without an answer."""
    with socket.create_connection(address, timeout=ANSWERED_S) as peer:
        received = bytearray()
        try:
            peer.sendall(sent.data)
            if not sent.whole:
                peer.shutdown(socket.SHUT_WR)
            while data := peer.recv(1 << 16):
                received += data
        except OSError as error:
            # Cut while we were still sending.
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
    return _answers(bytes(received), is_head=sent.data.startswith(b"HEAD"))


_SIZES = (
    b"%x",
    b"%x;ext=" + b"x" * 300,
    b"-%x",
    b"%xg",
    b"0000000000000000000000%x",
    b"ffffffffff%x",
)


def _chunked(path: str, body: bytes, size: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    return head + size % len(body) + b"\r\n" + body + b"\r\n0\r\n\r\n"


def _answers(data: bytes, *, is_head: bool) -> list[Answer]:
    """All answers that are complete; the connection may have been cut in the last one."""

    class Received:
        def __init__(self, stream: io.BytesIO) -> None:
            self.stream = stream

        def makefile(self, _: str) -> io.BytesIO:
            return self.stream

    answers = []
    stream = io.BytesIO(data)
    stream.close = lambda: None  # type: ignore[method-assign]
    while stream.tell() < len(data):
        one = http.client.HTTPResponse(
            Received(stream),  # type: ignore[arg-type]
            method="HEAD" if is_head else None,
        )
        one.begin()
        try:
            body = one.read()
        except http.client.IncompleteRead:
            break
        answers.append(Answer(one.status, tuple(one.getheaders()), body))
        if is_head:
            # A request that ends before its method is believed is refused with a body.
            break
    return answers
