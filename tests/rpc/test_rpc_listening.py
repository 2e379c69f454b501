"""Ports: a claimed one is given to nobody else; one that listens no more refuses newcomers, and
whoever is connected notices nothing."""

from __future__ import annotations

import errno
import socket

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.rpc.address import PortInUse, check_listen, claimed
from batonlm.rpc.server import ProcessServer, stop_listening


def test_newcomers_are_refused_and_others_go_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            with accepted:
                assert stop_listening(port) == 1
                client.sendall(b"still here")
                assert accepted.recv(64) == b"still here"
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), 5)
        socket.create_connection(other.getsockname(), 5).close()
    assert stop_listening(port) == 0


async def test_a_claimed_port_is_kept_for_the_server_that_comes_later() -> None:
    with claimed("127.0.0.1:0", "listen") as (listen, bound):
        assert listen == bound != "127.0.0.1:0"
        with pytest.raises(PortInUse) as refused:
            check_listen(listen, "listen")
        assert refused.value.field == "listen"
        with pytest.raises(PortInUse), claimed(listen, "listen"):
            pass
        with claimed(listen, "listen", shared=True) as (again, _):
            assert again == listen
        # The claim itself answers nobody.
        port = int(listen.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        server = ProcessServer(listen=listen, services=[], claimed=True)
        assert await server.start() == listen
        socket.create_connection(("127.0.0.1", port), 5).close()
        await server.stop(0)
    check_listen(listen, "listen")


def test_a_machine_without_the_family_of_an_address_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_such_family(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_such_family)
    with pytest.raises(InvalidArgument, match="no address of this machine") as refused:
        check_listen("[::1]:0", "listen")
    assert refused.value.field == "listen"
