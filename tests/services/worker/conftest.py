"""A port for a process that a test starts."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])
