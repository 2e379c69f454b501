"""A process whose ring is full of known bytes, for others to read. TRANSPORT SLOTS BYTES.

Prints one line of JSON that describes it and lives until its standard input ends.
"""

from __future__ import annotations

import json
import secrets
import sys

from baton.kv.loopback import LoopbackTransport
from baton.kv.nixl import NixlTransport
from baton.kv.slots import SlotRing
from baton.kv.transport import KvTransport
from baton.kv.ucx import KvNetwork, Ucx, choose, inherited


def fill(ring: SlotRing) -> None:
    """Slot i holds the byte i + 1."""
    for index in range(ring.num_slots):
        ring.view(index)[:] = bytes([index + 1]) * ring.slot_bytes


def make(name: str, ring: SlotRing, incarnation: str) -> KvTransport:
    if name == "loopback":
        return LoopbackTransport(ring)
    return NixlTransport(ring, incarnation, ucx())


def ucx() -> Ucx:
    """What UCX may do: a test that sets UCX_TLS trusts its own machine."""
    network = KvNetwork.TRUSTED if inherited() else KvNetwork.LOCAL
    return choose(network, inherited=inherited())


def main() -> None:
    name, num_slots, slot_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ring = SlotRing(num_slots, slot_bytes)
    fill(ring)
    incarnation = secrets.token_hex(16)
    transport = make(name, ring, incarnation)
    description = {
        "incarnation": incarnation,
        "metadata": transport.metadata().hex(),
        "base_address": ring.base_address,
    }
    print(json.dumps(description), flush=True)
    sys.stdin.read()
    transport.close()
    ring.close()


if __name__ == "__main__":
    main()
