"""A giving worker as a process of its own, whose KV is kept as bfloat16 and sent as what its
arguments say, RECEIVER and one offer for each WIRE_DTYPE:HANDOVER_ID.

Prints one line of JSON, the address and instance id of each sender, and lives until its standard
input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import grpc
import torch

from batonlm.core.request.model import KvLayout
from batonlm.engine.kv.cache import KvCache
from batonlm.rpc.errors import ErrorInterceptor
from batonlm.transfer.sender import KvSender
from batonlm.transfer.transports import Staging
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server
from tests.kv.rig import BUFFER_BYTES, TOKENS, identity

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 4, 16
NUM_POSITIONS = 50
NUM_BUFFERS = 4
EXTENTS = ((1, 2), (0, 1), (3, 1))
"""Where the positions lie."""


def layout(wire_dtype: str) -> KvLayout:
    return KvLayout("ab" * 32, wire_dtype, num_layers=2, num_kv_heads=2, key_size=8, value_size=8)


def filled(wire_dtype: str) -> KvCache:
    """The same numbers, whatever they are sent as."""
    cache = KvCache(layout(wire_dtype), NUM_BLOCKS, BLOCK_SIZE, CPU, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator) * 100)
    return cache


async def main() -> None:
    told = []
    async with AsyncExitStack() as ends:
        for argument in sys.argv[2:]:
            wire_dtype, handover_id = argument.split(":")
            server = grpc.aio.server(interceptors=[ErrorInterceptor()])
            me = identity("prefill", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            staging = await Staging.open(
                me.instance_id, transport="nixl", num_buffers=NUM_BUFFERS, buffer_bytes=BUFFER_BYTES
            )
            ends.push_async_callback(staging.close)
            sender = KvSender(me, layout(wire_dtype), staging)
            add_HandoverServicer_to_server(sender, server)
            await server.start()
            ends.push_async_callback(server.stop, None)
            ends.push_async_callback(sender.close)
            offer(sender, wire_dtype, bytes.fromhex(handover_id), sys.argv[1])
            told.append((me.instance_id, me.address))
        print(json.dumps(told), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def offer(sender: KvSender, wire_dtype: str, handover_id: bytes, receiver: str) -> None:
    cache = filled(wire_dtype)

    async def pack(first_position: int, count: int, out: memoryview) -> None:
        cache.pack(EXTENTS, first_position, count, out)

    made = sender.offer(handover_id, receiver, NUM_POSITIONS, pack, deadline_s=60)
    made.announce()
    made.advance(NUM_POSITIONS)
    made.tokens(TOKENS)


if __name__ == "__main__":
    asyncio.run(main())
