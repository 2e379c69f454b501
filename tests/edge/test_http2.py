"""HTTP/2, with prior knowledge and over TLS: what keeps its rules, and requests that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.edge.conftest import SecureEdge
from tests.edge.edge import Asked, EdgeProcess
from tests.edge.frames import Field, Frames, fields, prior_knowledge
from tests.edge.wire import PATH, PREFACE, completion_of, exchange, head, healthy, length, prompt

OUTER = prompt("outer")
MAX_STREAMS = 1000
"""What one connection may ever ask for at a time, whatever a server's own number is."""


@pytest.fixture
def client(edge: EdgeProcess) -> Iterator[httpx.Client]:
    base = f"http://{edge.address}"
    with httpx.Client(
        base_url=base, http1=False, http2=True, trust_env=False, timeout=30
    ) as client:
        yield client


async def streamed(client: httpx.AsyncClient, text: str) -> str:
    """The text of an answer that is streamed."""
    body = json.loads(prompt(text, stream=True))
    found, last = "", ""
    async with client.stream("POST", PATH.decode(), json=body) as response:
        assert (response.status_code, response.http_version) == (200, "HTTP/2")
        async for line in response.aiter_lines():
            if line:
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    found += json.loads(last)["choices"][0]["text"]
    assert last == "[DONE]"
    return found


def test_prior_knowledge(client: httpx.Client) -> None:
    response = client.post(
        PATH.decode(), content=OUTER, headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.http_version) == (200, "HTTP/2")
    assert response.json()["choices"][0]["text"] == completion_of("outer")
    assert client.get("/health").status_code == 200
    assert client.get("/nowhere").status_code == 404
    assert client.post(PATH.decode(), content=b"{").status_code == 400


async def test_streams_side_by_side(edge: EdgeProcess) -> None:
    """Over one connection: all are one client's."""
    texts = [f"text {number}" for number in range(20)]
    async with httpx.AsyncClient(
        base_url=f"http://{edge.address}", http1=False, http2=True, trust_env=False, timeout=30
    ) as client:
        found = await asyncio.gather(*(streamed(client, text) for text in texts))
    assert found == [completion_of(text) for text in texts]


def test_a_large_body(client: httpx.Client) -> None:
    """Larger than any window."""
    content = prompt("outer") + b" " * 700_000
    response = client.post(
        PATH.decode(), content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
    too_large = client.post(PATH.decode(), content=b" " * (2 << 20))
    assert too_large.status_code == 413


@pytest.mark.deep
async def test_over_tls(secure: SecureEdge) -> None:
    """Negotiated: whoever offers it gets HTTP/2, all others HTTP/1.1."""
    base = f"https://{secure.process.address}"
    for http2, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
        async with httpx.AsyncClient(
            base_url=base, http2=http2, verify=secure.trusting, trust_env=False, timeout=30
        ) as client:
            response = await client.get("/health")
            assert (response.status_code, response.http_version) == (200, version)
            if http2:
                assert await streamed(client, "secret") == completion_of("secret")


def test_streams_of_a_connection_are_bounded(edge: EdgeProcess) -> None:
    """The number is said, and a client that does not keep it is refused what is beyond."""
    body = prompt("endless", stream=True)
    # Windows of nothing: none of the answers can end, nor be sent.
    with prior_knowledge(edge.host_and_port, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}) as client:
        frames = client.received()
        said = next(frame for frame in frames if isinstance(frame, SettingsFrame))
        limit = said.settings[SettingsFrame.MAX_CONCURRENT_STREAMS]
        assert limit <= MAX_STREAMS
        for number in range(limit + 10):
            client.send(*client.post(2 * number + 1, body))
        client.send(PingFrame(0, opaque_data=b"12345678"))
        refused = set()
        for frame in frames:
            if isinstance(frame, RstStreamFrame):
                refused.add(frame.stream_id)
            if isinstance(frame, PingFrame) and len(refused) >= 10:
                break
        assert edge.open_streams() <= limit
    healthy(edge.host_and_port)


Send = Callable[[Frames], list[Frame]]


def with_fields(*named: Field) -> Send:
    """A whole request, of these fields alone."""
    return lambda client: [
        client.headers(1, named, end=False),
        DataFrame(1, data=OUTER, flags=["END_STREAM"]),
    ]


def and_fields(*more: Field) -> Send:
    return with_fields(*fields(), *more)


def with_pseudo(name: str, *values: str) -> Send:
    """Some other values of one pseudo-header field, or none."""
    others = [field for field in fields() if field[0] != name]
    return with_fields(*((name, value) for value in values), *others)


def wrong_length(difference: int) -> Send:
    size = str(len(OUTER) + difference)
    return and_fields(("content-length", size))


def raw_name(name: bytes, value: bytes = b"a") -> Send:
    """A field that hpack would not write."""

    def send(client: Frames) -> list[Frame]:
        top = client.headers(1, fields(), end=False)
        top.data += b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        return [top, DataFrame(1, data=OUTER, flags=["END_STREAM"])]

    return send


MALFORMED: dict[str, Send] = {
    "no-method": with_pseudo(":method"),
    "no-path": with_pseudo(":path"),
    "no-scheme": with_pseudo(":scheme"),
    "two-methods": with_pseudo(":method", "POST", "GET"),
    "two-paths": with_pseudo(":path", PATH.decode(), "/health"),
    "empty-path": with_pseudo(":path", ""),
    "path-with-space": with_pseudo(":path", "/v1/comp letions HTTP/1.1"),
    "path-with-lines": with_pseudo(":path", "/health HTTP/1.1\r\nX: y"),
    "method-with-lines": with_pseudo(":method", "POST / HTTP/1.1\r\nX: y"),
    "authority-with-user": with_pseudo(":authority", "user@localhost"),
    "unknown-pseudo": with_fields((":other", "a"), *fields()),
    "status": with_fields((":status", "200"), *fields()),
    "pseudo-last": with_fields(*fields()[1:], fields()[0]),
    "no-host-at-all": with_pseudo(":authority"),
    "two-hosts": with_fields(
        *(field for field in fields() if field[0] != ":authority"),
        ("host", "localhost"),
        ("host", "other"),
    ),
    "upper-case": raw_name(b"X-Upper"),
    "name-with-colon": raw_name(b"x:y"),
    "name-with-space": raw_name(b"x y"),
    "name-with-line": raw_name(b"x\r\ny"),
    "name-empty": raw_name(b""),
    "value-with-line": raw_name(b"x", b"a\r\nb: c"),
    "value-with-nul": raw_name(b"x", b"a\x00b"),
    "connection": and_fields(("connection", "close")),
    "transfer-encoding": and_fields(("transfer-encoding", "chunked")),
    "upgrade": and_fields(("upgrade", "foo")),
    "keep-alive": and_fields(("keep-alive", "5")),
    "proxy-connection": and_fields(("proxy-connection", "keep-alive")),
    "te": and_fields(("te", "gzip")),
    "length-too-long": wrong_length(+1),
    "length-too-short": wrong_length(-1),
    "length-0": and_fields(("content-length", "0")),
    "length-signed": and_fields(("content-length", f"+{len(OUTER)}")),
    "length-letters": and_fields(("content-length", "abc")),
    "length-overflow": and_fields(("content-length", "9" * 30)),
    "length-twice": and_fields(("content-length", str(len(OUTER))), ("content-length", "5")),
}  # fmt: skip


@pytest.mark.parametrize("send", MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_reach_nobody(edge: EdgeProcess, send: Send) -> None:
    """RFC 9113 8.1.1: a stream error, or an answer that says so; other streams go on."""
    with prior_knowledge(edge.host_and_port) as client:
        client.send(*send(client))
        outcome = client.outcome(1)
    assert outcome.status == 0 or 400 <= outcome.status < 500
    assert edge.asked() == []
    healthy(edge.host_and_port)


TRAILERS = [
    ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
    ("content-length", "5"),
    ("transfer-encoding", "chunked"),
    (":path", "/health"),
]


@pytest.mark.parametrize("trailer", TRAILERS, ids=[name for name, _ in TRAILERS])
def test_a_trailer_is_no_header(edge: EdgeProcess, trailer: Field) -> None:
    """One that must not be there may also be the end of its stream."""
    with prior_knowledge(edge.host_and_port) as client:
        top, data = client.post(1, OUTER)
        data.flags.discard("END_STREAM")
        client.send(top, data, client.headers(1, [trailer]))
        outcome = client.outcome(1)
    if outcome.ended:
        assert outcome.status == 400 or completion_of("outer").encode() in outcome.body
    else:
        assert trailer is not TRAILERS[0]
    assert edge.asked() in ([], [Asked("outer", "", "")])


def frame_of(size: int, kind: int, flags: int, stream: int) -> bytes:
    """A frame's head and as many zeroes."""
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + bytes(size)


def setting(identifier: int, value: int) -> bytes:
    return SettingsFrame(0, settings={identifier: value}).serialize()


def too_much_data(client: Frames) -> bytes:
    return client.headers(1, fields(), end=False).serialize() + frame_of(1 << 20, 0, 0, 1)


def stream_of_a_server(client: Frames) -> bytes:
    return client.headers(2, fields()).serialize()


def going_backwards(client: Frames) -> bytes:
    return b"".join(frame.serialize() for n in (5, 3) for frame in client.post(n, OUTER))


PING = PingFrame(0, opaque_data=b"12345678")
GREATEST = WindowUpdateFrame(0, window_increment=(1 << 31) - 1)
WHOLE = ["END_HEADERS", "END_STREAM"]

BROKEN: dict[str, bytes | Callable[[Frames], bytes]] = {
    "data-too-large": too_much_data,
    "data-without-stream": DataFrame(1, data=b"x").serialize(),
    "data-on-0": frame_of(5, 0, 0, 0),
    "headers-too-large": frame_of(1 << 20, 1, 4, 1),
    "headers-on-0": frame_of(5, 1, 4, 0),
    "headers-of-server": stream_of_a_server,
    "compression": HeadersFrame(1, data=b"\xff" * 20, flags=WHOLE).serialize(),
    "continuation-alone": frame_of(5, 9, 4, 1),
    "headers-interrupted": frame_of(5, 1, 0, 1) + PING.serialize(),
    "padding-too-long": b"\x00\x00\x05\x00\x08\x00\x00\x00\x01\xff1234",
    "settings-of-5": frame_of(5, 4, 0, 0),
    "settings-on-stream": frame_of(6, 4, 0, 1),
    "settings-ack-of-6": frame_of(6, 4, 1, 0),
    "settings-window": setting(SettingsFrame.INITIAL_WINDOW_SIZE, (1 << 32) - 1),
    "settings-frame-size": setting(SettingsFrame.MAX_FRAME_SIZE, 1),
    "ping-of-7": frame_of(7, 6, 0, 0),
    "ping-on-stream": frame_of(8, 6, 0, 1),
    "window-of-0": frame_of(4, 8, 0, 0),
    "window-overflow": GREATEST.serialize() * 2,
    "reset-of-idle": RstStreamFrame(7).serialize(),
    "reset-on-0": frame_of(4, 3, 0, 0),
    "push": frame_of(8, 5, 4, 1),
    "going-backwards": going_backwards,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_breaks_the_rules_ends_the_connection(
    edge: EdgeProcess, broken: bytes | Callable[[Frames], bytes]
) -> None:
    with prior_knowledge(edge.host_and_port) as client:
        client.send(PING)
        assert any(isinstance(frame, PingFrame) for frame in client.received())
        with suppress(ConnectionError):  # It may end before all is sent.
            client.socket.sendall(broken if isinstance(broken, bytes) else broken(client))
        assert client.is_ended()
    healthy(edge.host_and_port)


def test_what_may_be_ignored_is(edge: EdgeProcess) -> None:
    """Unknown frames and settings, priorities and greetings: RFC 9113 5.5, 6.3 and 6.5.2."""
    with prior_knowledge(edge.host_and_port, {0xF000: 7}) as client:
        client.socket.sendall(frame_of(20, 0xBB, 0xFF, 0))
        client.send(PriorityFrame(3, depends_on=0, stream_weight=5), *client.post(1, OUTER))
        outcome = client.outcome(1)
        assert (outcome.status, outcome.ended) == (200, True)
        client.send(PingFrame(0, opaque_data=b"12345678"), *client.post(3, OUTER))
        assert client.outcome(3).status == 200


@pytest.mark.parametrize("segments", [1, 2])
def test_who_began_in_http1_goes_on_in_it(edge: EdgeProcess, segments: int) -> None:
    """A body that reads like HTTP/2 is a body."""
    inner = PREFACE + SettingsFrame(0).serialize()
    top = head(length(inner))
    said = exchange(edge.host_and_port, [top, inner] if segments == 2 else [top + inner])
    assert said.statuses == (400,) and edge.asked() == []
