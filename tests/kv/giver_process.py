"""A giving worker as a process of its own, told what to do by lines of JSON. Argument: TRANSPORT.

{"offer": id, "collector": incarnation, "num_positions": n, "finished": m, "tokens": bool}
{"state": true}     answers {"free": slots, "offers": n}
"""

from __future__ import annotations

import asyncio
import json
import sys

import grpc

from baton.core.errors import BatonError
from baton.kv.giver import Giver
from baton.kv.line import Liveness
from baton.kv.staging import Staging
from baton.rpc.handover import HandoverServicer
from baton.v1.handover_pb2_grpc import add_HandoverServicer_to_server
from tests.kv.rig import LAYOUT, SLOT_BYTES, TOKENS, identity, kv_of
from tests.kv.ring_process import ucx

NUM_SLOTS = 4


async def main() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    me = identity("prefill", f"127.0.0.1:{port}")
    staging = await Staging.open(
        me.incarnation,
        transport=sys.argv[1],
        num_slots=NUM_SLOTS,
        slot_bytes=SLOT_BYTES,
        ucx=ucx(),
    )
    giver = Giver(me, LAYOUT, staging, liveness=Liveness(heartbeat_s=0.1, missed=10))
    add_HandoverServicer_to_server(HandoverServicer(giver), server)
    await server.start()
    say(address=me.address, incarnation=me.incarnation)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := await lines.readline():
        command = json.loads(line)
        if "offer" in command:
            offer(giver, command)
            say(offered=True)
        else:
            say(free=staging.ring.num_free, offers=giver.num_offers)
    await giver.close()
    await server.stop(None)
    await staging.close()


def offer(giver: Giver, command: dict[str, object]) -> None:
    handover_id = bytes.fromhex(str(command["offer"]))

    async def pack(first_position: int, count: int, out: memoryview) -> None:
        out[:] = b"".join(kv_of(handover_id, first_position + i) for i in range(count))

    offer = giver.offer(
        handover_id,
        str(command["collector"]),
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
