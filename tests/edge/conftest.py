"""One edge in a process of its own, shared by all tests that change nothing about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.edge.edge import EdgeOptions, EdgeProcess


@pytest.fixture(scope="session")
def shared_edge() -> Iterator[EdgeProcess]:
    edge = EdgeProcess(EdgeOptions(limits={}))
    try:
        yield edge
    finally:
        edge.close()


@pytest.fixture
def edge(shared_edge: EdgeProcess) -> EdgeProcess:
    """Open to all, with the limits that a router has without options."""
    shared_edge.asked()
    return shared_edge
