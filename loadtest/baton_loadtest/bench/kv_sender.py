"""The process whose KV `baton bench kv` hands over: a real Sender over a pool of random KV.

First line: {"transport", "layout", "positions", "num_buffers", "buffer_bytes", "digest"}; answered
with the sender's identity, a ring that holds all of it in one buffer and one that holds it in KV
chunks. Then {"seal": n} puts sealed KV chunks of n positions into that last ring and answers
their digests,
and {"offer": id, "receiver": instance_id, "positions": n} offers n positions, all computed.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from baton.core.handover.table import HANDOVER_ID_BYTES
from baton.core.request.attempt import ChoiceTokens, SequenceKey
from baton.core.request.model import KvLayout
from baton.engine.thread import CopyThread
from baton.rpc.lifecycle import run
from baton.rpc.server import Service
from baton.transfer.grpc import HandoverServicer
from baton.transfer.kv_chunk import Sealer
from baton.transfer.sender import KvSender
from baton.transfer.staging import ALIGNMENT
from baton.transfer.transports import Staging
from baton.v1 import handover_pb2_grpc
from baton_loadtest.bench.beside import answer
from baton_loadtest.bench.kv_ends import Exhibit, free_address, identity, serve
from baton_loadtest.bench.kv_parts import SECRET, memory, runs, use

DEADLINE_S = 60.0
TOKENS = (ChoiceTokens(SequenceKey("bench", 0, 1), 0, (7,)),)


class _Giving:
    """Everything behind the commands. `open` is the first one."""

    def __init__(self, ends: AsyncExitStack) -> None:
        self._ends = ends
        self._open = False

    async def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        if not self._open:
            self._open = True
            return await self._begin(**command)
        if "seal" in command:
            return self._seal(command["seal"])
        return self._offer(command)

    async def _begin(
        self,
        transport: str,
        layout: dict[str, Any],
        positions: int,
        num_buffers: int,
        buffer_bytes: int,
        digest: str,
    ) -> dict[str, Any]:
        self._layout = KvLayout(**layout)
        self._digest = use(digest)
        self._cache, self._extents = memory(self._layout, positions)
        address = free_address()
        me = identity("prefill", address)
        self._staging = await Staging.open(
            me.instance_id, transport=transport, num_buffers=num_buffers, buffer_bytes=buffer_bytes
        )
        self._ends.push_async_callback(self._staging.close)
        self._copies = CopyThread()
        self._ends.callback(self._copies.close)
        self._sender = KvSender(me, self._layout, self._staging, digest=self._digest)
        self._ends.push_async_callback(self._sender.close)
        servicer = HandoverServicer(self._sender)
        add = partial(handover_pb2_grpc.add_HandoverServicer_to_server, servicer)
        server = await serve(address, Service("baton.v1.Handover", add))
        self._ends.push_async_callback(server.stop, 0.2)
        size = positions * self._layout.bytes_per_position
        whole = Exhibit(transport, 2, -(-size // ALIGNMENT) * ALIGNMENT)
        self._ends.callback(whole.close)
        kv_chunks = len(runs(positions, buffer_bytes, self._layout))
        self._kv_chunks = Exhibit(transport, kv_chunks, buffer_bytes)
        self._ends.callback(self._kv_chunks.close)
        for exhibit in (whole, self._kv_chunks):
            for index in range(exhibit.ring.num_buffers):
                exhibit.ring.view(index)[:] = os.urandom(exhibit.ring.buffer_bytes)
        return {
            "sender": asdict(me),
            "whole": whole.describe(),
            "kv_chunks": self._kv_chunks.describe(),
        }

    def _seal(self, positions: int) -> dict[str, Any]:
        ring = self._kv_chunks.ring
        sealer = Sealer(SECRET, self._kv_chunks.instance_id, self._layout, self._digest)
        headers = [sealer.header(run) for run in runs(positions, ring.buffer_bytes, self._layout)]
        for header in headers:
            sealer.seal(header, ring.view(header.index))
        return {"digests": [header.digest.hex() for header in headers]}

    def _offer(self, command: dict[str, Any]) -> dict[str, Any]:
        handover_id = bytes.fromhex(command["offer"])
        assert len(handover_id) == HANDOVER_ID_BYTES

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            await self._copies.run(
                partial(self._cache.pack, self._extents, first_position, count, out)
            )

        offer = self._sender.offer(
            handover_id, command["receiver"], command["positions"], pack, deadline_s=DEADLINE_S
        )
        offer.announce()
        offer.advance(offer.num_positions)
        offer.tokens(TOKENS)
        return {}


async def main() -> int:
    async with AsyncExitStack() as ends:
        await answer(_Giving(ends).handle)
    return 0


if __name__ == "__main__":
    run(main())
