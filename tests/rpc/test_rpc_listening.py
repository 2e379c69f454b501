"""A port that listens no more: newcomers are refused, whoever is connected notices nothing."""

from __future__ import annotations

import socket

import pytest

from batonlm.rpc.server import stop_listening


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
