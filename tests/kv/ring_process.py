"""A process whose ring is full of known bytes, for others to read. TRANSPORT BUFFERS BYTES.

Prints one line of JSON that describes it and lives until its standard input ends.
"""

from __future__ import annotations

import json
import secrets
import sys

from batonlm.transfer.loopback import LoopbackTransport
from batonlm.transfer.nixl import NixlTransport
from batonlm.transfer.staging import KvTransport, StagingPool
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, inherited


def fill(ring: StagingPool) -> None:
    """Buffer i holds the byte i + 1."""
    for index in range(ring.num_buffers):
        ring.view(index)[:] = bytes([index + 1]) * ring.buffer_bytes


def make(name: str, ring: StagingPool, instance_id: str) -> KvTransport:
    if name == "loopback":
        return LoopbackTransport(ring)
    return NixlTransport(ring, instance_id, ucx())


def ucx() -> Ucx:
    """What UCX may do: a test that sets UCX_TLS trusts its own machine."""
    network = KvNetwork.TRUSTED if inherited() else KvNetwork.LOCAL
    return choose(network, inherited=inherited())


def main() -> None:
    name, num_buffers, buffer_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ring = StagingPool(num_buffers, buffer_bytes)
    fill(ring)
    instance_id = secrets.token_hex(16)
    transport = make(name, ring, instance_id)
    description = {
        "instance_id": instance_id,
        "metadata": transport.metadata().hex(),
        "base_address": ring.memory.regions[0].address,
    }
    print(json.dumps(description), flush=True)
    sys.stdin.read()
    transport.close()
    ring.close()


if __name__ == "__main__":
    main()
