"""The router's gRPC face over scripted answers, on the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.services.router_http.scripted import Scripted, grpc_server


@pytest.fixture
def frontend() -> Scripted:
    return Scripted()


@pytest.fixture
async def address(frontend: Scripted) -> AsyncIterator[str]:
    server = grpc_server(frontend)
    started = await server.start()
    server.set_serving(True)
    try:
        yield started
        assert frontend.open_streams == 0
    finally:
        await server.stop(0)
