"""A client of `vllm.grpc.engine.VllmEngine`, over real gRPC, of a router with scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from batonlm.router.api.access import Authenticator, OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.vllm import engine_service
from batonlm.router.config import RouterConfig
from batonlm.rpc.server import PUBLIC_STREAMS, ProcessServer, PublicLimits

if TYPE_CHECKING:
    from tests.services.router.conftest import World

TEXT = "in the beginning"
IDS = tuple(TEXT.encode())


@dataclass
class Gateway:
    """A client of the engine."""

    stub: pb_grpc.VllmEngineStub
    world: World

    async def generate(self, **fields: object) -> list[pb.GenerateResponse]:
        call = self.stub.Generate(request(**fields), timeout=120)
        return [message async for message in call]


def request(**fields: object) -> pb.GenerateRequest:
    """Twenty tokens of a prompt, unless something else is asked."""
    made = pb.GenerateRequest(text=TEXT, sampling_params=sampling())
    made.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return made


def sampling(**fields: object) -> pb.SamplingParams:
    return pb.SamplingParams(**{"seed": 5, "max_tokens": 20, "ignore_eos": True, **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def gateway_of(
    world: World, config: RouterConfig, authenticator: Authenticator | None = None
) -> AsyncIterator[Gateway]:
    assert world.fleet is not None
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[engine_service(world.pipeline, world.fleet, config)],
        public=True,
        interceptors=[KeyInterceptor(authenticator or OpenAuthenticator())],
        limits=PublicLimits(streams=PUBLIC_STREAMS * 2),
    )
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        yield Gateway(pb_grpc.VllmEngineStub(channel), world)
    await server.stop(0)
