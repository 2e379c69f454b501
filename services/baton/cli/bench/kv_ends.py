"""What both ends of a measured hand-over are made of: rings that can be read, a gRPC server.

Knows which process is which no more than what is measured.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

from baton.cli.ports import HOST, free_ports
from baton.core.handover_messages import RingDescription
from baton.core.model import KvLayout, WorkerIdentity
from baton.kv.loopback import LoopbackTransport
from baton.kv.nixl import NixlTransport
from baton.kv.slots import SlotRing
from baton.kv.transport import KvTransport
from baton.kv.ucx import KvNetwork, choose, inherited
from baton.rpc.server import ProcessServer, Service

NO_DIGEST = "none"
"""In place of a digest's name: parcels are not sealed."""


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

    def __init__(self, transport: str, num_slots: int, slot_bytes: int) -> None:
        self.incarnation = secrets.token_hex(16)
        self.ring = SlotRing(max(2, num_slots), slot_bytes)
        self.transport = open_transport(transport, self.ring, self.incarnation)

    def describe(self) -> dict[str, Any]:
        return {
            "incarnation": self.incarnation,
            "metadata": self.transport.metadata().hex(),
            "ring": asdict(self.ring.describe()),
        }

    def close(self) -> None:
        self.transport.close()
        self.ring.close()


def open_transport(name: str, ring: SlotRing, incarnation: str) -> KvTransport:
    """On this machine only."""
    if name == "loopback":
        return LoopbackTransport(ring)
    return NixlTransport(ring, incarnation, choose(KvNetwork.LOCAL, inherited=inherited()))


def described(exhibit: dict[str, Any]) -> tuple[str, bytes, RingDescription]:
    """Incarnation, metadata and ring of an Exhibit elsewhere."""
    metadata = bytes.fromhex(exhibit["metadata"])
    return exhibit["incarnation"], metadata, RingDescription(**exhibit["ring"])


async def serve(address: str, *services: Service) -> ProcessServer:
    """A server on the loopback interface. address: see `free_address`."""
    server = ProcessServer(listen=address, services=services, reflection=False)
    await server.start()
    return server


def free_address() -> str:
    """Of the loopback interface, known before anything listens there."""
    return f"{HOST}:{free_ports(1)[0]}"
