"""A server that echoes, and a channel to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from batonlm.rpc.channels import Channels
from batonlm.rpc.server import ProcessServer
from tests.rpc.echo import Echo


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def channel(echo: Echo) -> AsyncIterator[grpc.aio.Channel]:
    server = ProcessServer(listen="127.0.0.1:0", services=[echo.service()])
    channels = Channels()
    try:
        yield channels.get(await server.start())
    finally:
        await channels.close()
        await server.stop(0)
