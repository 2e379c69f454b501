"""The gRPC service `baton.v1.Adapters` of a router: an operator's changes, for all workers."""

from __future__ import annotations

from typing import Any

import grpc

from batonlm.core.errors import Unauthenticated
from batonlm.router.api.grpc.access import caller
from batonlm.router.request.pipeline import Pipeline
from batonlm.rpc.convert import filled
from batonlm.rpc.server import Service
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1 import adapters_pb2_grpc, types_pb2

SERVICE = "baton.v1.Adapters"


class RouterAdaptersServicer(adapters_pb2_grpc.AdaptersServicer):
    """Refuses whoever is no operator."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def service(self) -> Service:
        return Service(
            SERVICE, lambda server: adapters_pb2_grpc.add_AdaptersServicer_to_server(self, server)
        )

    async def LoadAdapter(
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        _check_operator(context)
        adapter = await self._pipeline.adapter_manager.load(
            request.name,
            request.path,
            model=request.model,
            digest=request.digest,
            replace=request.replace,
        )
        return pb.LoadAdapterResponse(adapter=filled(types_pb2.AdapterDescription, adapter))

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        _check_operator(context)
        await self._pipeline.adapter_manager.unload(
            request.name, model=request.model, digest=request.digest
        )
        return pb.UnloadAdapterResponse()


def _check_operator(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if not caller(context).operator:
        raise Unauthenticated("Adapters are everybody's: show an operator's key.")
