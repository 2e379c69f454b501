"""What an attacker behind a proxy could do to its other users: nothing.

A proxy sends the requests of many users over the same connection to the edge. When proxy and edge
do not agree where a request ends, one user's answer goes to another.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.edge.conftest import running
from tests.edge.edge import EdgeOptions, EdgeProcess
from tests.edge.proxies import PROXIES, proxy
from tests.edge.test_floods import GROWTH_MIB
from tests.edge.wire import (
    Address,
    answers_of,
    chunk,
    completion_of,
    connected,
    head,
    healthy,
    length,
    prompt,
)

pytestmark = pytest.mark.edge

ROUNDS = 3
TRAILER_BYTES = 45 << 20
CHUNKED = b"Transfer-Encoding: chunked"
KEY_OF_ATTACKER = b"Authorization: Bearer attacker"
KEY_OF_OTHER = b"Authorization: Bearer other"


@pytest.fixture(scope="module")
def keyed() -> Iterator[EdgeProcess]:
    """It wants keys."""
    with running(EdgeOptions(limits={}, keyed=True)) as edge:
        yield edge


@pytest.fixture(params=PROXIES)
def through(
    keyed: EdgeProcess, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Address]:
    with proxy(request.param, keyed.address, tmp_path_factory.mktemp("proxy")) as address:
        keyed.asked()
        yield address


def completion(text: str, *fields: bytes) -> bytes:
    body = prompt(text)
    return head(*fields, length(body)) + body


WHOLE = completion("late", KEY_OF_ATTACKER)
"""Its answer would go to whoever asks next."""
BEGUN = head(KEY_OF_ATTACKER, b"Content-Length: 150") + b'{"prompt": "'
"""Whatever comes next over the connection would become its body."""
INNER = {"whole": WHOLE, "begun": BEGUN, "without-key": head(b"Content-Length: 150") + b"{"}
LINES = {"small": 0, "two-buffers": 8_000, "a-file": 60_000}
"""So many empty lines before it, which a server passes over before a request: proxies send a large
body in parts, or from a file."""

UPGRADES = {
    "foo": (b"Connection: Upgrade", b"Upgrade: foo"),
    "h2c": (
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
    ),
    "websocket": (
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ),
}


def own_answer(connection: socket.socket, text: str, key: bytes) -> None:
    """Asks, and asserts that it gets what it asked for."""
    connection.sendall(completion(text, key))
    said = answers_of(connection, 1)
    assert said.statuses == (200,)
    assert said.answers[0].text == completion_of(text)


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "later"])
def test_everyone_gets_the_own_answer(
    keyed: EdgeProcess,
    through: Address,
    upgrade: tuple[bytes, ...],
    inner: bytes,
    lines: int,
    at_once: bool,
) -> None:
    """The body of a request that asks for an upgrade is itself a request."""
    body = b"\r\n" * lines + inner
    top = head(*upgrade, length(body))
    for number in range(ROUNDS):
        with connected(through) as attacker:
            with suppress(ConnectionError):
                attacker.sendall(top)
                if not at_once:
                    healthy(through)  # The proxy has read the head alone.
                attacker.sendall(body)
            said = answers_of(attacker, 1)
        # No key; and if it were not asked for, the body is no JSON, whatever it looks like.
        assert len(said.answers) <= 1
        assert all(400 <= answer.status < 500 for answer in said.answers)
        for more in range(3):
            with connected(through) as other:
                own_answer(other, f"own {number} {more}", KEY_OF_OTHER)
    asked = keyed.asked()
    assert {each.tenant for each in asked} == {"other"}
    assert len(asked) == 3 * ROUNDS


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_nobody_hears_of_another_tenant(keyed: EdgeProcess, through: Address, lines: int) -> None:
    """Attackers with keys of their own, side by side with others."""
    body = b"\r\n" * lines + WHOLE
    top = head(KEY_OF_ATTACKER, *UPGRADES["foo"], length(body))
    for number in range(ROUNDS):
        with connected(through) as attacker, connected(through) as other:
            attacker.sendall(top)
            attacker.sendall(body)
            assert answers_of(attacker, 1).statuses in ((400,), ())
            own_answer(other, f"secret {number}", KEY_OF_OTHER)
        with connected(through) as attacker:
            own_answer(attacker, f"own {number}", KEY_OF_ATTACKER)
    texts = {(each.tenant, each.prompt) for each in keyed.asked()}
    assert texts == {
        (tenant, f"{word} {number}")
        for tenant, word in (("other", "secret"), ("attacker", "own"))
        for number in range(ROUNDS)
    }


def test_upgrades_are_passed_over(through: Address) -> None:
    """An ordinary request of a client that would rather speak something else."""
    body = prompt("ordinary")
    for upgrade in (UPGRADES["foo"], UPGRADES["h2c"]):
        with connected(through) as connection:
            connection.sendall(head(KEY_OF_OTHER, *upgrade, length(body)))
            healthy(through)
            connection.sendall(body)
            said = answers_of(connection, 1)
        assert said.answers[0].text == completion_of("ordinary")


def test_streams_pass(through: Address) -> None:
    with connected(through) as connection:
        body = prompt("streamed", stream=True)
        connection.sendall(head(KEY_OF_OTHER, length(body)) + body)
        (answer,) = answers_of(connection, 1).answers
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == completion_of("streamed")


def test_leaving_is_passed_on(keyed: EdgeProcess, through: Address) -> None:
    with connected(through) as connection:
        body = prompt("silent", stream=True)
        connection.sendall(head(KEY_OF_OTHER, length(body)) + body)
        keyed.wait_for_streams(1)
    keyed.wait_for_streams(0)


@pytest.mark.parametrize("with_key", [False, True], ids=["without-key", "with-key"])
def test_trailers_without_an_end(keyed: EdgeProcess, through: Address, with_key: bool) -> None:
    """And straight to the edge they are in test_floods.py."""
    line = b"X-Trailer: " + b"y" * 8000 + b"\r\n"
    key = (KEY_OF_ATTACKER,) if with_key else ()
    with keyed.watched(GROWTH_MIB), connected(through) as connection:
        with suppress(ConnectionError):
            connection.sendall(head(*key, CHUNKED) + chunk(prompt("outer")) + b"0\r\n")
            for _ in range(TRAILER_BYTES // len(line)):
                connection.sendall(line)
            connection.sendall(b"\r\n")
            assert len(answers_of(connection, 1).answers) <= 1
        healthy(through)
    healthy(keyed.host_and_port)
    assert keyed.asked() in ([], [("outer", "attacker", "")])
