"""What goes wrong with an input is logged under the request and the trace of the call."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from batonlm.core.errors import BatonError, Internal, InvalidArgument
from batonlm.core.observe.stages import TraceContext
from batonlm.rpc.errors import REQUEST_ID_KEY
from batonlm.rpc.tracing import metadata_of
from batonlm.tokenizer.encoder import Asked, Encoded
from batonlm.v1 import tokenizer_pb2 as pb
from tests.services.tokenizer.encoders import serving

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
    encoder = Faulty()
    async with serving(encoder) as (stub, _):
        yield stub, encoder


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
    caplog.set_level(logging.DEBUG, "batonlm.tokenizer")
    inputs = [pb.EncodeInput(text="x")]
    answer = await stub.Encode(pb.EncodeRequest(inputs=inputs), metadata=CALL)
    assert answer.outputs[0].HasField("error") is (error is not None)
    lines = [record for record in caplog.records if record.name.startswith("batonlm.tokenizer")]
    assert [line.levelno for line in lines] == ([] if level is None else [level])
    for line in lines:
        assert (vars(line)["request_id"], vars(line)["trace_id"]) == ("r1", TRACE)
