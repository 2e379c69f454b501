"""Reads from a process that is frozen, over UCX's TCP transport: a program for test_peer_death.

Argument: what becomes of the frozen process, "continues" or "dies". Prints JSON of what was seen.
It is a process of its own because UCX reads UCX_TLS once, when it is loaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from batonlm.transfer.staging import StagingPool, TransportError
from batonlm.transfer.transports import TransferReader
from tests.kv.neighbours import neighbour
from tests.kv.ring_process import make

NUM_BUFFERS, BUFFER_BYTES = 4, 4 << 20
CANARY = 0xEE


def _until_stopped(pid: int) -> None:
    """The signal is there at once, but until a thread of the process takes it all of them go on."""
    deadline = time.monotonic() + 120
    while {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} != {"T"}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pid} does not stop")
        time.sleep(0.001)


def _state(task: Path) -> str:
    """See proc(5): after the name, which is in parentheses."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


async def main(filter_reason: str) -> dict[str, object]:
    ring = StagingPool(NUM_BUFFERS, BUFFER_BYTES)
    reader = TransferReader(lambda: make("nixl", ring, secrets.token_hex(16)))
    await reader.start()
    with neighbour("nixl", NUM_BUFFERS, BUFFER_BYTES) as peer:
        await reader.add_peer(peer.instance_id, peer.metadata, peer.ring)
        warm = ring.take("peer")
        assert warm is not None
        await reader.read(peer.instance_id, 0, warm, BUFFER_BYTES, 20)
        warm.release()
        for index in range(NUM_BUFFERS):
            ring.view(index)[:] = bytes([CANARY]) * BUFFER_BYTES

        os.kill(peer.process.pid, signal.SIGSTOP)
        await asyncio.to_thread(_until_stopped, peer.process.pid)
        buffer = ring.take("peer")
        assert buffer is not None
        try:
            await reader.read(peer.instance_id, 1, buffer, BUFFER_BYTES, 0.5)
            in_time = True
        except TransportError:
            in_time = False
        buffer.release()
        orphaned = ring.num_orphaned
        # The others go on being used, and what is in them must stay.
        others = [ring.take("other"), ring.take("other")]
        for other in others:
            assert other is not None and other.index != buffer.index
            other.view[:] = bytes([CANARY]) * BUFFER_BYTES

        os.kill(
            peer.process.pid, signal.SIGCONT if filter_reason == "continues" else signal.SIGKILL
        )
        async with asyncio.timeout(120):
            while ring.num_orphaned:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        landed = ring.view(buffer.index).tobytes()
        canaries = all(
            ring.view(index).tobytes() == bytes([CANARY]) * BUFFER_BYTES
            for index in range(NUM_BUFFERS)
            if index != buffer.index
        )
        for other in others:
            if other is not None:
                other.release()
        alive = peer.process.poll() is None
        await reader.close()
    return {
        "in_time": in_time,
        "orphaned": orphaned,
        "landed_late": landed == bytes([2]) * BUFFER_BYTES,
        "canaries": canaries,
        "free": ring.num_free,
        "peer_alive": alive,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
