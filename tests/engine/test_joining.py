"""Machines join by a token: who lacks it is refused, and delays nobody."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.engine.ranks import tcp
from batonlm.engine.ranks.link import Link, LinkLost
from batonlm.engine.ranks.machines import Order, RankMachines
from batonlm.engine.ranks.tcp import LinkKind, LinkName, connect, gather, key_of

TIME_S = 20.0
KEY = key_of("the token of this group", "group-0")
WANTED = [LinkName(LinkKind.MACHINE, 1), LinkName(LinkKind.STEPS, 2)]


class Door:
    """A machine that gathers WANTED."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address: tcp.Address = self.listener.getsockname()
        self.joined: dict[LinkName, Link] = {}
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        def joined(name: LinkName, connection: socket.socket) -> None:
            self.joined[name] = Link(connection)

        gather(self.listener, KEY, WANTED, TIME_S, joined)

    def all_join(self) -> None:
        """Both ends of each link reach each other."""
        for name in WANTED:
            link = Link(connect(self.address, KEY, name, TIME_S))
            link.send(b"hello", TIME_S)
            while name not in self.joined:
                threading.Event().wait(0.01)
            assert self.joined[name].receive(TIME_S) == b"hello"
            link.close()
        self._thread.join(TIME_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._thread.join(TIME_S)
        self.listener.close()
        for link in self.joined.values():
            link.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def refused(connection: socket.socket) -> bool:
    """Whether the other end closes it without more than its number."""
    connection.settimeout(TIME_S)
    received = b""
    try:
        while part := connection.recv(4096):
            received += part
    except ConnectionResetError:
        pass
    return len(received) <= 32


def test_machines_with_the_token_join(door: Door) -> None:
    door.all_join()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 69, b"\xff" * 69])
def test_what_is_no_hello_is_refused(door: Door, sent: bytes) -> None:
    with socket.create_connection(door.address) as stranger:
        stranger.sendall(sent)
        assert refused(stranger)
    door.all_join()


@pytest.mark.parametrize(
    "key",
    [key_of("another token of a group", "group-0"), key_of("the token of this group", "group-1")],
)
def test_another_token_and_another_group_are_refused(door: Door, key: bytes) -> None:
    with pytest.raises(LinkLost):
        connect(door.address, key, WANTED[0], timeout_s=0.0)
    door.all_join()


def test_a_recorded_hello_does_not_serve_again(door: Door) -> None:
    """A stranger repeats to this machine what another one's hello was."""
    with socket.create_server(("127.0.0.1", 0)) as fake:
        said: list[bytes] = []

        def listen() -> None:
            accepted, _ = fake.accept()
            with accepted:
                accepted.sendall(b"\0" * 32)
                said.append(accepted.recv(69))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(LinkLost):
            connect(fake.getsockname(), KEY, WANTED[0], timeout_s=0.0)
        thread.join(TIME_S)
    with socket.create_connection(door.address) as stranger:
        stranger.sendall(said[0])
        assert refused(stranger)
    door.all_join()


def test_strangers_that_say_nothing_delay_nobody(door: Door) -> None:
    """More of them than may wait: the oldest make room."""
    strangers = [socket.create_connection(door.address) for _ in range(tcp.MAX_WAITING + 20)]
    try:
        door.all_join()
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_link_joins_once(door: Door) -> None:
    first = connect(door.address, KEY, WANTED[0], TIME_S)
    while not door.joined:
        threading.Event().wait(0.01)
    with connect(door.address, KEY, WANTED[0], TIME_S) as second:
        assert second.recv(1) == b""
    connect(door.address, KEY, WANTED[1], TIME_S).close()
    first.close()


def test_who_does_not_come_ends_the_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(LinkLost):
        gather(listener, KEY, WANTED, 0.1, lambda name, connection: None)


class GivesUp:
    """A launcher that finds no machines."""

    watched: Sequence[Link] = ()

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.closed = False

    def start(self, order: Order) -> None:
        self.orders.append(order)

    def check(self) -> None:
        raise InvalidArgument("has no such machines", field="ray_address")

    def close(self) -> None:
        self.closed = True


def test_a_launcher_that_finds_no_machines_ends_the_waiting() -> None:
    launcher = GivesUp()
    with pytest.raises(InvalidArgument, match="no such machines"):
        RankMachines(
            2, 1, stages=3, machines=3, listen=("127.0.0.1", 0), key=KEY, launcher=launcher
        )
    (order,) = launcher.orders
    assert (order.machines, order.ranks_of_a_machine) == (3, 2)
    assert order.leader[0] == "127.0.0.1" and order.leader[1]
    assert launcher.closed
