"""What waits to be encoded is dropped, uncomputed, when its caller leaves or runs out of time."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from batonlm.core.request.request import TextPrompt
from batonlm.tokenizer.encoder import Asked, Encoded
from batonlm.tokenizer.servicer import TokenizerServicer
from batonlm.v1 import tokenizer_pb2 as pb
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub
from tests.services.tokenizer.encoders import serving

PATIENCE_S = 120.0


class SlowEncoder:
    """Encodes texts as soon as `go` is set."""

    vocab_size = 9
    has_chat_template = False

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began: list[str] = []

    def encode(self, asked: Sequence[Asked]) -> list[Encoded]:
        for prompt, *_ in asked:
            assert isinstance(prompt, TextPrompt)
            self.began.append(prompt.text)
        assert self.go.wait(PATIENCE_S)
        return [Encoded(array("i", [1]), b"") for _ in asked]


@pytest.fixture
async def busy() -> AsyncIterator[tuple[TokenizerStub, TokenizerServicer, SlowEncoder]]:
    encoder = SlowEncoder()
    async with serving(encoder) as (stub, servicer):
        try:
            yield stub, servicer, encoder
        finally:
            encoder.go.set()


def ask(text: str) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=[pb.EncodeInput(text=text)])


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (it changes elsewhere)
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("how", ["leaves", "runs out of time"])
async def test_it_is_never_encoded(busy: Any, how: str) -> None:
    stub, servicer, encoder = busy
    first = stub.Encode(ask("first"))
    await until(lambda: encoder.began == ["first"])
    dropped = stub.Encode(ask("dropped"), timeout=None if how == "leaves" else 0.2)
    # On a machine that stands still its time may be up before it arrives.
    await until(lambda: servicer.inputs.num == 2 or dropped.done())
    if how == "leaves":
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
    else:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await dropped
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: servicer.inputs.num == 1)
    last = stub.Encode(ask("last"))
    await until(lambda: servicer.inputs.num == 2)
    encoder.go.set()
    assert (await first).outputs[0].token_ids and (await last).outputs[0].token_ids
    assert encoder.began == ["first", "last"]
    await until(lambda: servicer.inputs.num == 0)
