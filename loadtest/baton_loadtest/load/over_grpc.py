"""Asks a router's `Inference.Generate` for streamed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.cli.access import Access
from baton.rpc.address import split
from baton.rpc.options import PUBLIC_STREAMS
from baton.rpc.transport import open_client_channel
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from baton_loadtest.load.samples import ANSWERED, REFUSED


@dataclass(slots=True)
class _Line:
    """A channel, which is one connection, and how many calls it has."""

    channel: grpc.aio.Channel
    generate: Any
    calls: int = 0


class OverGrpc:
    """Of one server. Close it."""

    def __init__(self, access: Access, model: str) -> None:
        """Raises InvalidArgument for what is no address."""
        split(access.address, "grpc")
        self._access, self._model = access, model
        self._metadata: Any = access.metadata
        self._lines: list[_Line] = []

    def prepare(self, ids: Sequence[int], output_tokens: int) -> inference_pb2.GenerateRequest:
        return greedy(ids, output_tokens, self._model)

    async def ask(
        self,
        request: inference_pb2.GenerateRequest,
        hear: Callable[[Sequence[int], int], None],
    ) -> str:
        line = self._line()
        line.calls += 1
        whole = False
        call = line.generate(request, metadata=self._metadata)
        try:
            async for response in call:
                event = response.event
                if ids := event.delta.token_ids:
                    hear(ids, len(ids))
                elif event.HasField("finished"):
                    whole = True
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return REFUSED
            return error.code().name.lower().replace("_", " ")
        finally:
            call.cancel()
            line.calls -= 1
        return ANSWERED if whole else "ended early"

    async def close(self) -> None:
        for line in self._lines:
            await line.channel.close()
        self._lines.clear()

    def _line(self) -> _Line:
        """One that has room: a router bears so many calls of one connection at a time, and those
        beyond would wait in this process."""
        for line in self._lines:
            if line.calls < PUBLIC_STREAMS:
                return line
        channel = open_client_channel(self._access.address, self._access.ca)
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        self._lines.append(_Line(channel, stub.Generate))
        return self._lines[-1]


def greedy(
    ids: Sequence[int], output_tokens: int, model: str = ""
) -> inference_pb2.GenerateRequest:
    """Of a length known in advance."""
    return inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=ids),
        options=inference_pb2.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stop=types_pb2.StopParams(max_tokens=output_tokens, ignore_eos=True),
            return_token_ids=True,
        ),
    )
