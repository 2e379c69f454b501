"""Transfers 1 MiB between two NIXL agents in two processes and prints the result as a JSON line.

Run as `python -m batonlm.cli.nixl_probe`; it starts its own peer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from batonlm.core.errors import InvalidArgument
from batonlm.transfer.nixl import NixlTransport
from batonlm.transfer.staging import ReadState, StagingPool
from batonlm.transfer.ucx import KvNetwork, choose, inherited
from batonlm.v1 import handover_pb2 as pb

SIZE = 1 << 20
PEER_FLAG = "--peer"
DEADLINE_S = 30.0


def give() -> int:
    """The peer: fills a buffer, prints its address, and waits until its standard input ends."""
    ring = StagingPool(2, SIZE)
    transport = _open(ring, "sender")
    try:
        payload = os.urandom(SIZE)
        ring.view(0)[:] = payload
        description = {
            "metadata": base64.b64encode(transport.metadata()).decode(),
            "base_address": ring.memory.regions[0].address,
            "digest": hashlib.sha256(payload).hexdigest(),
        }
        print(json.dumps(description), flush=True)
        sys.stdin.read()
    finally:
        transport.close()
    return 0


def collect() -> int:
    """Reads the peer's buffer. Returns 0 if every byte is right."""
    command = [sys.executable, "-m", "batonlm.cli.nixl_probe", PEER_FLAG]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        ring = StagingPool(2, SIZE)
        try:
            transport = _open(ring, "receiver")
            try:
                announcement = peer.stdout.readline()
                right = bool(announcement) and _read(transport, ring, json.loads(announcement))
            finally:
                transport.close()
        finally:
            peer.stdin.close()
    if not announcement:
        return _failed(f"the peer ended with code {peer.returncode}")
    if not right:
        return _failed("what arrived differs from what was sent")
    print(json.dumps({"bytes": SIZE}))
    return 0


def _read(transport: NixlTransport, ring: StagingPool, theirs: dict[str, Any]) -> bool:
    """Reads the peer's buffer 0 into buffer 1. Returns whether the contents are right."""
    description = pb.StagingPoolDescription(
        base_address=theirs["base_address"], buffer_bytes=SIZE, num_buffers=2
    )
    transport.add_peer("sender", base64.b64decode(theirs["metadata"]), description)
    handle = transport.post("sender", 0, 1, SIZE)
    deadline = time.monotonic() + DEADLINE_S
    while transport.poll(handle) is ReadState.RUNNING:
        if time.monotonic() > deadline:
            # A running transfer may still write; only the end of the process stops it.
            os._exit(_failed("the transfer does not end"))
        time.sleep(0.001)
    transport.release(handle)
    arrived = hashlib.sha256(ring.view(1)).hexdigest()
    return arrived == str(theirs["digest"])


def _open(ring: StagingPool, name: str) -> NixlTransport:
    return NixlTransport(ring, name, choose(KvNetwork.LOCAL, inherited=inherited()))


def _failed(why: str) -> int:
    print(why, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(give() if sys.argv[1:] == [PEER_FLAG] else collect())
    except InvalidArgument as error:
        sys.exit(f"{error.field}: {error.message}")
