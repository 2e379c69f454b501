"""HTTP/1.1 as bytes: requests of the tests here, a socket that sends them, answers taken apart."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from tests.edge.edge import LIVENESS_S
from tests.services.router_http.scripted import whole_answer

Address = tuple[str, int]
PATH = b"/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def prompt(text: str, **more: object) -> bytes:
    """The body that asks for the completion of a text."""
    return json.dumps({"prompt": text, "max_tokens": 200, **more}).encode()


def completion_of(text: str) -> str:
    return whole_answer(text, 0)


def head(
    *fields: bytes,
    line: bytes = b"POST " + PATH + b" HTTP/1.1",
    host: bytes | None = b"Host: localhost",
    end: bytes = b"\r\n",
) -> bytes:
    """A request's head. fields: whole lines without their ends."""
    named = [line, *([] if host is None else [host]), b"Content-Type: application/json", *fields]
    return b"".join(each + end for each in named) + end


def length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def post(text: str, *fields: bytes) -> bytes:
    """A whole request with a body of a known length."""
    body = prompt(text)
    return head(*fields, length(body)) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answer(NamedTuple):
    """headers: lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Of a completion."""
        text: str = json.loads(self.body)["choices"][0]["text"]
        return text


class NotWhole(Exception):
    """What was read so far does not end with a whole answer."""


@dataclass(frozen=True)
class Said:
    """All that came over one connection. whole: it ended behind an answer."""

    answers: list[Answer]
    whole: bool

    @property
    def statuses(self) -> tuple[int, ...]:
        return tuple(answer.status for answer in self.answers)


def taken_apart(data: bytes, *, head_only: bool = False) -> Said:
    """The final answers in what a server sent; interim ones are passed over. head_only: the
    answers have no bodies. Raises ValueError for what is no HTTP/1 answer.
    """
    answers: list[Answer] = []
    while data:
        try:
            answer, data = _one(data, head_only)
        except NotWhole:
            return Said(answers, whole=False)
        if answer.status >= 200:
            answers.append(answer)
    return Said(answers, whole=True)


def _one(data: bytes, head_only: bool) -> tuple[Answer, bytes]:
    top, separator, rest = data.partition(b"\r\n\r\n")
    if not data.startswith(b"HTTP/1."[: len(data)]):
        raise ValueError(f"no answer: {data[:200]!r}")
    if not separator:
        raise NotWhole
    line, *fields = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (f.partition(":") for f in fields)}
    status = int(line.split(" ")[1])
    if head_only or status < 200 or status in (204, 304):
        return Answer(status, headers, b""), rest
    if "chunked" in headers.get("transfer-encoding", ""):
        body, rest = _unchunked(rest)
    else:
        size = int(headers.get("content-length", "0"))
        body, rest = rest[:size], rest[size:]
        if len(body) < size:
            raise NotWhole
    return Answer(status, headers, body), rest


def _unchunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, separator, data = data.partition(b"\r\n")
        if not separator:
            raise NotWhole
        number = int(size, 16)
        if len(data) < number + 2:
            raise NotWhole
        body, data = body + data[:number], data[number + 2 :]
        if not number:
            return body, data


@contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=LIVENESS_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def healthy(address: Address) -> None:
    """Asserts that a new connection is answered."""
    with connected(address) as connection:
        connection.sendall(HEALTH)
        said = answers_of(connection, 1)
    assert said.statuses == (200,)


def answers_of(connection: socket.socket, number: int, *, head_only: bool = False) -> Said:
    """Reads so many answers, or fewer where the connection ends before."""
    data = b""
    while True:
        said = taken_apart(data, head_only=head_only)
        if len(said.answers) >= number:
            return said
        try:
            more = connection.recv(65536)
        except ConnectionError:
            return said
        if not more:
            return said
        data += more


def exchange(
    address: Address,
    segments: Iterable[bytes],
    *,
    wait_for: int = 1,
    head_only: bool = False,
    ends: bool = False,
) -> Said:
    """All that a server says to what is sent over one connection.

    Behind each segment a request on another connection is answered, so that the server has read
    what was sent so far, alone. So many answers are waited for; then the sending side ends, and
    what the server makes of that is read, too. ends: the server has to end the connection itself.
    """
    with connected(address) as connection:
        data = b""
        with suppress(ConnectionError):
            for position, segment in enumerate(segments):
                if position:
                    healthy(address)
                connection.sendall(segment)
        # A connection that the server ended with unread data is reset, at any of these.
        with suppress(ConnectionError):
            while len(taken_apart(data, head_only=head_only).answers) < wait_for:
                more = connection.recv(65536)
                data += more
                if not more:
                    break
            if not ends:
                healthy(address)
                with suppress(OSError):  # There may be no connection any more.
                    connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                data += more
    return taken_apart(data, head_only=head_only)
