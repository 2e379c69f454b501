"""`baton doctor kv --listen`: a worker with staging buffers and no model, as a doctor's peer."""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack

from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerState
from batonlm.rpc.lifecycle import new_instance_id, run_until_stopped
from batonlm.rpc.server import ProcessServer, Service
from batonlm.rpc.tls import Certificates
from batonlm.rpc.worker import worker_service
from batonlm.transfer.sender import KvSender
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import Ucx
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server

NUM_BUFFERS, BUFFER_BYTES = 4, 4 << 20
LAYOUT = KvLayout("00" * 32, "float32", num_layers=1, num_kv_heads=1, key_size=32, value_size=32)


async def listen(
    address: str,
    transport: str,
    ucx: Ucx,
    as_json: bool,
    certificates: Certificates | None,
    token: str = "",
) -> int:
    """Serves until stopped and returns the exit code. Raises the errors of a worker's start."""
    me = WorkerIdentity("doctor", new_instance_id(), address)
    async with AsyncExitStack() as ends:
        staging = await Staging.open(
            me.instance_id,
            transport=transport,
            num_buffers=NUM_BUFFERS,
            buffer_bytes=BUFFER_BYTES,
            ucx=ucx,
        )
        ends.push_async_callback(staging.close)
        sender = KvSender(me, LAYOUT, staging)
        ends.push_async_callback(sender.close)
        description = WorkerDescription(me, layout=LAYOUT, transports=staging.names)
        load = WorkerLoad(WorkerState.SERVING)
        server = ProcessServer(
            listen=address,
            services=[
                Service(
                    "baton.v1.Handover",
                    lambda server: add_HandoverServicer_to_server(sender, server),
                ),
                worker_service(lambda: description, lambda: load),
            ],
            certificates=certificates,
            token=token,
        )
        listening = await server.start()
        server.set_serving(True)
        network = ucx.network.value
        if as_json:
            print(json.dumps({"listen": listening, "kv_network": network}), flush=True)
        else:
            print(
                f"listens at {listening}; on the other machine: "
                f"baton doctor kv --peer HOST:PORT --kv-network {network}\nCtrl-C ends it.",
                file=sys.stderr,
            )
        return await run_until_stopped(server, _nothing, drain_timeout_s=1.0)


async def _nothing() -> None:
    """Has no work to finish."""
