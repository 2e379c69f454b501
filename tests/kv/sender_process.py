"""A giving worker as a process of its own, told what to do by lines of JSON. Argument: TRANSPORT.

{"offer": id, "receiver": instance_id, "num_positions": n, "finished": m, "tokens": bool}
{"state": true}     answers {"free": buffers, "offers": n}
"""

from __future__ import annotations

import asyncio
import json
import sys

import grpc

from batonlm.core.errors import BatonError
from batonlm.transfer.sender import KvSender
from batonlm.transfer.stream import Liveness
from batonlm.transfer.transports import Staging
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server
from tests.kv.rig import BUFFER_BYTES, LAYOUT, TOKENS, identity, kv_of
from tests.kv.ring_process import ucx

NUM_BUFFERS = 4
LIVENESS = Liveness(heartbeat_s=0.25, missed=20)
"""Of both sides: a process that only waits for a core is silent for less."""


async def main() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    me = identity("prefill", f"127.0.0.1:{port}")
    staging = await Staging.open(
        me.instance_id,
        transport=sys.argv[1],
        num_buffers=NUM_BUFFERS,
        buffer_bytes=BUFFER_BYTES,
        ucx=ucx(),
    )
    sender = KvSender(me, LAYOUT, staging, liveness=LIVENESS)
    add_HandoverServicer_to_server(sender, server)
    await server.start()
    say(address=me.address, instance_id=me.instance_id)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := await lines.readline():
        command = json.loads(line)
        if "offer" in command:
            offer(sender, command)
            say(offered=True)
        else:
            say(free=staging.ring.num_free, offers=sender.num_offers)
    await sender.close()
    await server.stop(None)
    await staging.close()


def offer(sender: KvSender, command: dict[str, object]) -> None:
    handover_id = bytes.fromhex(str(command["offer"]))

    async def pack(first_position: int, count: int, out: memoryview) -> None:
        out[:] = b"".join(kv_of(handover_id, first_position + i) for i in range(count))

    offer = sender.offer(
        handover_id,
        str(command["receiver"]),
        int(str(command["num_positions"])),
        pack,
        deadline_s=60,
    )
    offer.announce()
    offer.advance(int(str(command["finished"])))
    if command["tokens"]:
        offer.tokens(TOKENS)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except BatonError as error:
        sys.exit(error.message)
