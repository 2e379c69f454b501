"""Against a real gRPC server of Inference in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from baton_loadtest.drive import (
    ANSWERED,
    REFUSED,
    GrpcLoadClient,
    LoadLimits,
    OpenLoop,
    Run,
    TokenIds,
)
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from batonlm.cli.access import Access
from batonlm.rpc.server import PUBLIC_STREAMS
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc


class Inference(inference_pb2_grpc.InferenceServicer):
    """What it does to a request, by its number."""

    def __init__(self, gate: asyncio.Event | None = None, expected: int = 0) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.peers: set[str] = set()
        self._gate = gate
        self._expected = expected
        self.all_there = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.peers.add(context.peer())
        number = len(self.requests)
        if number == self._expected:
            self.all_there.set()
        if self._gate is not None:
            await self._gate.wait()
        if number == 2:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if number == 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield pb.GenerateResponse(event=pb.GenerationEvent(accepted=pb.RequestAccepted()))
        for token in range(request.options.stop.max_tokens):
            delta = pb.ChoiceDelta(token_ids=[token])
            yield pb.GenerateResponse(event=pb.GenerationEvent(delta=delta))
        if number != 4:
            yield pb.GenerateResponse(event=pb.GenerationEvent(finished=pb.RequestFinished()))

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.ChatResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        yield pb.ChatResponse()

    async def Resume(
        self, request: pb.ResumeRequest, context: Any
    ) -> AsyncIterator[pb.ResumeResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        yield pb.ResumeResponse()

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        return pb.LeaveResponse()

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        return pb.EmbedResponse()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        return pb.ScoreResponse()


async def with_server(inference: Inference, use: Callable[[GrpcLoadClient], Awaitable[Run]]) -> Run:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcLoadClient(Access(f"127.0.0.1:{port}"), "tiny")
    try:
        return await use(client)
    finally:
        await client.close()
        await server.stop(None)


def runner(client: GrpcLoadClient) -> OpenLoop:
    return OpenLoop(client, TokenIds(0, 64, 1899), LoadLimits(request_s=30.0))


async def test_every_end_has_its_name() -> None:
    inference = Inference()
    source = Drawn(Arrivals(Kind.CONSTANT, 20, 0.4), fixed(9, 3))
    run = await with_server(inference, lambda client: runner(client).run(source.workload(0)))
    ends = sorted(one.end for one in run.samples)
    assert ends == sorted([ANSWERED] * 5 + [REFUSED, "unavailable", "ended early"])
    assert all(one.tokens == 3 for one in run.samples if one.end == ANSWERED)
    asked = inference.requests[0]
    assert len(asked.token_ids.ids) == 9
    assert asked.model == "tiny"
    assert asked.options.stop.ignore_eos and asked.options.return_token_ids


async def test_many_have_more_than_one_connection() -> None:
    """Else those beyond what a router bears of one would wait in this process."""
    gate = asyncio.Event()
    many = PUBLIC_STREAMS + 20
    inference = Inference(gate, many)
    source = Drawn(Arrivals(Kind.CONSTANT, 1000, many / 1000), fixed(2, 1))

    async def use(client: GrpcLoadClient) -> Run:
        running = asyncio.create_task(runner(client).run(source.workload(0)))
        async with asyncio.timeout(120):
            await inference.all_there.wait()
        gate.set()
        return await running

    run = await with_server(inference, use)
    assert len(inference.peers) == 2
    assert [one.end for one in run.samples].count(ANSWERED) == many - 3
