"""What goes wrong with an input is logged under the request and the trace of the call."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.core.errors import BatonError, Internal, InvalidArgument
from baton.core.model import ModelDescription, WorkerIdentity
from baton.core.trace_context import TraceContext
from baton.grammar.checker import Checker
from baton.rpc.interceptors import REQUEST_ID_KEY
from baton.rpc.server import ProcessServer, Service
from baton.rpc.tracing import metadata_of
from baton.tokenizer.encoder import Asked, Encoded
from baton.tokenizer.lanes import Lanes
from baton.tokenizer.servicer import TokenizerServicer
from baton.v1 import tokenizer_pb2 as pb
from baton.v1.tokenizer_pb2_grpc import TokenizerStub, add_TokenizerServicer_to_server

TRACE = "a" * 32
CALL = ((REQUEST_ID_KEY, "r1"), *metadata_of(TraceContext(f"00-{TRACE}-{'b' * 16}-01")))


class Faulty:
    """Encodes nothing: every input has this error."""

    vocab_size = 9
    has_chat_template = False

    def __init__(self) -> None:
        self.error: BatonError | None = None

    def encode(self, asked: Sequence[Asked]) -> list[Encoded | BatonError]:
        return [self.error or Encoded(array("i", [1]), b"") for _ in asked]


@pytest.fixture
async def served() -> AsyncIterator[tuple[Any, Faulty]]:
    encoder: Any = Faulty()
    with ThreadPoolExecutor(1) as one_thread:
        servicer = TokenizerServicer(
            encoder,
            ModelDescription("m", "", 0, 0, ()),
            lambda: WorkerIdentity("tokenizer", "i" * 32, ""),
            Lanes(one_thread, 1, cores=1),
            Checker(Path(), (), cpu_s=1.0, num_processes=1),
            max_waiting_bytes=1 << 20,
        )
        service = Service(
            "baton.v1.Tokenizer",
            lambda server: add_TokenizerServicer_to_server(servicer, server),
        )
        server = ProcessServer(listen="127.0.0.1:0", services=[service], reflection=False)
        address = await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield TokenizerStub(channel), encoder
        finally:
            await server.stop(0)


def refused_because(cause: Exception) -> InvalidArgument:
    error = InvalidArgument("are not accepted", field="messages")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (Internal("a fault"), logging.ERROR),
        (refused_because(ZeroDivisionError()), logging.DEBUG),
        (InvalidArgument("is bad", field="prompt"), None),
        (None, None),
    ],
)
async def test_faults_name_their_request(
    error: BatonError | None,
    level: int | None,
    served: tuple[Any, Faulty],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub, encoder = served
    encoder.error = error
    caplog.set_level(logging.DEBUG, "baton.tokenizer")
    inputs = [pb.EncodeInput(text="x")]
    answer = await stub.Encode(pb.EncodeRequest(inputs=inputs), metadata=CALL)
    assert answer.outputs[0].HasField("error") is (error is not None)
    lines = [record for record in caplog.records if record.name.startswith("baton.tokenizer")]
    assert [line.levelno for line in lines] == ([] if level is None else [level])
    for line in lines:
        assert (vars(line)["request_id"], vars(line)["trace_id"]) == ("r1", TRACE)
