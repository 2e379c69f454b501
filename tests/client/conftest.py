"""The router's gRPC face over scripted answers, on the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from baton.router.grpc_door import KeyInterceptor
from baton.router.keys import OpenDoor
from baton.router.pipeline import Pipeline
from baton.router.servicer import InferenceServicer
from baton.rpc.server import ProcessServer, Service
from baton.v1 import inference_pb2_grpc
from tests.services.router_http.scripted import Scripted


@pytest.fixture
def frontend() -> Scripted:
    return Scripted()


@pytest.fixture
async def address(frontend: Scripted) -> AsyncIterator[str]:
    servicer = InferenceServicer(cast(Pipeline, frontend), stall_timeout_s=30.0)
    service = Service(
        "baton.v1.Inference",
        lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server),
    )
    server = ProcessServer(
        listen="127.0.0.1:0", services=[service], interceptors=[KeyInterceptor(OpenDoor())]
    )
    started = await server.start()
    server.set_serving(True)
    try:
        yield started
        assert frontend.open_streams == 0
    finally:
        await server.stop(0)
