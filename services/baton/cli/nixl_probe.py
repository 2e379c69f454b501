"""Moves 1 MiB between two NIXL agents in two processes and says so in one JSON line.

Run as `python -m baton.cli.nixl_probe`; it starts its own peer. Knows the KV transport only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import time

from baton.core.handover_messages import RingDescription
from baton.kv.nixl import NixlTransport
from baton.kv.slots import SlotRing
from baton.kv.transport import ReadState

SIZE = 1 << 20
PEER_FLAG = "--peer"
DEADLINE_S = 30.0


def give() -> None:
    """The peer: fills a slot, says where it is, and stays until its standard input ends."""
    ring = SlotRing(2, SIZE)
    transport = NixlTransport(ring, "giver")
    try:
        payload = os.urandom(SIZE)
        ring.view(0)[:] = payload
        description = {
            "metadata": base64.b64encode(transport.metadata()).decode(),
            "base_address": ring.base_address,
            "digest": hashlib.sha256(payload).hexdigest(),
        }
        print(json.dumps(description), flush=True)
        sys.stdin.read()
    finally:
        transport.close()


def collect() -> int:
    """Reads the peer's slot. Returns 0 when every byte is right."""
    command = [sys.executable, "-m", "baton.cli.nixl_probe", PEER_FLAG]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        try:
            theirs = json.loads(peer.stdout.readline())
            right = _read(theirs)
        finally:
            peer.stdin.close()
    if not right:
        print("what arrived differs from what was sent", file=sys.stderr)
        return 1
    print(json.dumps({"bytes": SIZE}))
    return 0


def _read(theirs: dict[str, str]) -> bool:
    ring = SlotRing(2, SIZE)
    transport = NixlTransport(ring, "collector")
    try:
        transport.add_peer(
            "giver",
            base64.b64decode(theirs["metadata"]),
            RingDescription(int(theirs["base_address"]), SIZE, 2),
        )
        handle = transport.post("giver", 0, 1, SIZE)
        deadline = time.monotonic() + DEADLINE_S
        while transport.poll(handle) is ReadState.RUNNING:
            if time.monotonic() > deadline:
                print("the transfer does not end", file=sys.stderr)
                # A running transfer may still write: only the end of the process stops it.
                os._exit(1)
            time.sleep(0.001)
        transport.release(handle)
        return hashlib.sha256(ring.view(1)).hexdigest() == theirs["digest"]
    finally:
        transport.close()


if __name__ == "__main__":
    sys.exit(give() if sys.argv[1:] == [PEER_FLAG] else collect())
