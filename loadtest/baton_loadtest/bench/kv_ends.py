"""What both ends of a measured hand-over are made of: rings that can be read, a gRPC server."""

from __future__ import annotations

import secrets
from typing import Any

from baton.cli.ports import HOST, free_ports
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.rpc.server import ProcessServer, Service
from baton.transfer.loopback import LoopbackTransport
from baton.transfer.nixl import NixlTransport
from baton.transfer.staging import KvTransport, StagingPool
from baton.transfer.ucx import KvNetwork, choose, inherited
from baton.v1 import handover_pb2 as pb

NO_DIGEST = "none"
"""In place of a digest's name: KV chunks are not sealed."""


def layout_of(settings: dict[str, Any], dtype: str = "float32") -> KvLayout:
    """The KV of a model with this config.json."""
    heads = settings["num_attention_heads"]
    size = settings.get("head_dim") or settings["hidden_size"] // heads
    return KvLayout(
        model_digest="00" * 32,
        dtype=dtype,
        num_layers=settings["num_hidden_layers"],
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        key_size=size,
        value_size=size,
    )


def identity(role: str, address: str = "") -> WorkerIdentity:
    return WorkerIdentity(role, secrets.token_hex(16), address)


class Exhibit:
    """A ring that another process may read, without anyone giving anything away."""

    def __init__(self, transport: str, num_buffers: int, buffer_bytes: int) -> None:
        self.instance_id = secrets.token_hex(16)
        self.ring = StagingPool(max(2, num_buffers), buffer_bytes)
        self.transport = open_transport(transport, self.ring, self.instance_id)

    def describe(self) -> dict[str, Any]:
        return {
            "instance_id": self.instance_id,
            "metadata": self.transport.metadata().hex(),
            "ring": self.ring.describe().SerializeToString().hex(),
        }

    def close(self) -> None:
        self.transport.close()
        self.ring.close()


def open_transport(name: str, ring: StagingPool, instance_id: str) -> KvTransport:
    """On this machine only."""
    if name == "loopback":
        return LoopbackTransport(ring)
    return NixlTransport(ring, instance_id, choose(KvNetwork.LOCAL, inherited=inherited()))


def described(exhibit: dict[str, Any]) -> tuple[str, bytes, pb.StagingPoolDescription]:
    """Instance_id, metadata and ring of an Exhibit elsewhere."""
    metadata = bytes.fromhex(exhibit["metadata"])
    ring = pb.StagingPoolDescription.FromString(bytes.fromhex(exhibit["ring"]))
    return exhibit["instance_id"], metadata, ring


async def serve(address: str, *services: Service) -> ProcessServer:
    """A server on the loopback interface. address: see `free_address`."""
    server = ProcessServer(listen=address, services=services, reflection=False)
    await server.start()
    return server


def free_address() -> str:
    """Of the loopback interface, known before anything listens there."""
    return f"{HOST}:{free_ports(1)[0]}"
