"""Edges in processes of their own, each shared by all tests that can bear its limits."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.edge.edge import EdgeOptions, EdgeProcess
from tests.rpc.authority import Authority

QUICK = {
    "head_timeout_s": 1.0,
    "body_timeout_s": 1.0,
    "keep_alive_s": 1.0,
    "stall_timeout_s": 1.0,
    "max_connections": 60,
    "max_per_address": 30,
}


@dataclass(frozen=True)
class SecureEdge:
    """trusting: what a client needs."""

    process: EdgeProcess
    trusting: ssl.SSLContext


@contextmanager
def running(options: EdgeOptions) -> Iterator[EdgeProcess]:
    edge = EdgeProcess(options)
    try:
        yield edge
    finally:
        edge.close()


@pytest.fixture(scope="session")
def plain_edge() -> Iterator[EdgeProcess]:
    with running(EdgeOptions(limits={})) as edge:
        yield edge


@pytest.fixture(scope="session")
def quick_edge() -> Iterator[EdgeProcess]:
    with running(EdgeOptions(limits=QUICK)) as edge:
        yield edge


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEdge]:
    """Like `quick`, and over TLS."""
    files = Authority(tmp_path_factory.mktemp("certificates")).host("public", "127.0.0.1")
    certificate = (str(files.cert), str(files.key))
    with running(EdgeOptions(limits=QUICK, certificate=certificate)) as edge:
        yield SecureEdge(edge, ssl.create_default_context(cafile=str(files.ca)))


@pytest.fixture
def edge(plain_edge: EdgeProcess) -> EdgeProcess:
    """Open to all, with the limits that a router has without options."""
    plain_edge.asked()
    return plain_edge


@pytest.fixture
def quick(quick_edge: EdgeProcess) -> EdgeProcess:
    """Its time-outs are all a second, and it takes few connections."""
    quick_edge.asked()
    return quick_edge
