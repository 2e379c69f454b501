"""The gRPC face of the router: `baton.v1.Inference`. Converts, calls, converts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc

from baton.core.errors import BatonError
from baton.core.request.request import Request
from baton.router.api.grpc.grpc_door import caller
from baton.router.api.grpc.inference_messages import (
    chat_from_proto,
    generate_from_proto,
    in_client_words,
    models_to_proto,
    put_event,
)
from baton.router.api.grpc.time_left import deadline_s
from baton.router.request.pipeline import Pipeline
from baton.rpc.calls import WriteTimeout
from baton.rpc.server import Service
from baton.rpc.tracing import context_of
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

Asked = TypeVar("Asked", pb.GenerateRequest, pb.ChatRequest)
Response = TypeVar("Response", pb.GenerateResponse, pb.ChatResponse)


SERVICE = "baton.v1.Inference"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """A request ends with its call, whoever ends it: client, deadline or stall."""

    def __init__(self, pipeline: Pipeline, *, stall_timeout_s: float) -> None:
        self._pipeline = pipeline
        self._stall_timeout_s = stall_timeout_s

    def service(self) -> Service:
        """Ready to be given to a ProcessServer."""
        return Service(
            SERVICE, lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        )

    async def Generate(  # type: ignore[override]
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        await self._answer(request, generate_from_proto, pb.GenerateResponse, context)

    async def Chat(  # type: ignore[override]
        self,
        request: pb.ChatRequest,
        context: grpc.aio.ServicerContext[pb.ChatRequest, pb.ChatResponse],
    ) -> None:
        await self._answer(request, chat_from_proto, pb.ChatResponse, context)

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        return models_to_proto(self._pipeline.models())

    async def _answer(
        self,
        message: Asked,
        read: Callable[[Asked, float | None], Request],
        new: Callable[[], Response],
        context: grpc.aio.ServicerContext[Asked, Response],
    ) -> None:
        tenant = caller(context)
        # The message is in memory already: what is held is room for its encoding.
        holding = self._pipeline.receive(tenant, message.ByteSize())
        try:
            self._pipeline.turn_away(tenant, message.options.priority)
            with self._pipeline.reading(tenant):
                request = read(message, deadline_s(context))
            trace = context_of(context.invocation_metadata() or ())
            stream = await self._pipeline.open(request.of(tenant, trace), holding)
            try:
                async with WriteTimeout(self._stall_timeout_s) as stall:
                    async for event in stream:
                        response = new()
                        put_event(event, response.event, return_token_ids=request.return_token_ids)
                        await stall.watch(context.write(response))
            finally:
                await stream.aclose()
        except BatonError as error:
            raise in_client_words(error) from error
        finally:
            holding.release()
