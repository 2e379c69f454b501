"""Every RPC that Baton's processes serve, found in the descriptors and by reflection.

A new RPC is found, and then fuzzed, without anyone naming it here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from batonlm import v1


@dataclass(frozen=True)
class Rpc:
    """One method. path: "/package.Service/Method"."""

    service: str
    method: str
    request: Descriptor
    response: Descriptor
    sends_many: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"


def all_rpcs() -> tuple[Rpc, ...]:
    """All that the protos know, in a fixed order."""
    return tuple(rpc for file in _files() for rpc in _rpcs(file))


def served_at(channel: grpc.Channel) -> set[str]:
    """The services that a process says it serves."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answer = next(stub.ServerReflectionInfo(iter([ask]), timeout=120, wait_for_ready=True))
    return {service.name for service in answer.list_services_response.service}


def _files() -> Iterator[FileDescriptor]:
    for module in pkgutil.iter_modules(v1.__path__, "batonlm.v1."):
        if module.name.endswith("_pb2"):
            yield importlib.import_module(module.name).DESCRIPTOR
    yield vllm_engine_pb2.DESCRIPTOR
    yield health_pb2.DESCRIPTOR
    yield reflection_pb2.DESCRIPTOR


def _rpcs(file: FileDescriptor) -> Iterator[Rpc]:
    for service in file.services_by_name.values():
        for method in service.methods:
            yield Rpc(
                service.full_name,
                method.name,
                method.input_type,
                method.output_type,
                method.client_streaming,
            )
