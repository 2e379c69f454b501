"""Starts one encode worker: load, wire, serve."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerDescription, WorkerLoad
from batonlm.encode.config import EncodeConfig
from batonlm.engine.config import configure_threads
from batonlm.rpc import config, lifecycle, logs, metrics
from batonlm.rpc.loop import freeze_garbage
from batonlm.rpc.server import Probes, ProcessServer, Service
from batonlm.rpc.worker import worker_service
from batonlm.v1.encode_pb2_grpc import add_EncodeServicer_to_server
from batonlm.worker.hardware import claim_for_ranks

if TYPE_CHECKING:
    from batonlm.encode.model import EncoderModel

ROLE = "encode"

BATCHES_AHEAD = 4
"""Shares of work that a router sends at a time: one in progress, and the next ones."""

log = logging.getLogger(__name__)


async def serve(options: EncodeConfig) -> int:
    """Runs the process and returns its exit code."""
    instance_id = lifecycle.new_instance_id()
    logs.setup(ROLE, options.log_level, options.log_json, instance_id=instance_id)
    log.info("%s", config.describe(options))
    metrics.tell_role(ROLE)
    probes = options.probes()
    await probes.open()
    # Before anything starts CUDA: this process sees no other GPU then.
    claim = claim_for_ranks(options.device, 1, 1)
    try:
        return await _serve(options, probes, instance_id, "cpu" if claim is None else "cuda")
    finally:
        if claim is not None:
            claim.close()


async def _serve(options: EncodeConfig, probes: Probes, instance_id: str, device: str) -> int:
    address = ""

    def identity() -> WorkerIdentity:
        return WorkerIdentity(ROLE, instance_id, options.advertise or address)

    def load() -> WorkerLoad:
        return WorkerLoad(
            servicer.inputs.state,
            waiting_sequences=servicer.inputs.num,
            waiting_tokens=thread.waiting_tokens,
        )

    probes.startup.enter("engine")
    configure_threads(options.threads)
    tracer = options.tracer(ROLE, instance_id)
    with (
        ExitStack() as ends,
        closing(tracer),
        ThreadPoolExecutor(1, "model", _give_way) as model_thread,
        ThreadPoolExecutor(1, "tokenize") as tokenizing,
    ):
        options = await asyncio.to_thread(options.with_model, ends)
        # torch is imported on the thread that computes, whose threads have its priority.
        opened = asyncio.get_running_loop().run_in_executor(
            model_thread, partial(_open, options, device, probes)
        )
        from batonlm.encode.service import EncodeServicer, ModelThread

        model = await opened
        freeze_garbage()
        thread = ModelThread(model_thread, model)
        servicer = EncodeServicer(model, thread, tokenizing, tracer)
        server = ProcessServer(
            listen=options.listen,
            services=[
                Service(
                    "baton.v1.Encode",
                    lambda server: add_EncodeServicer_to_server(servicer, server),
                ),
                worker_service(
                    lambda: WorkerDescription(
                        identity(), model.description, max_sequences=BATCHES_AHEAD
                    ),
                    load,
                ),
            ],
            probes=probes,
            certificates=options.certificates(),
            token=options.peer_token,
        )
        metrics.gauge(metrics.SEQUENCES, lambda: {("waiting",): servicer.inputs.num})
        address = await server.start()
        server.set_serving(True)
        log.info("encode serves %s at %s", model.description.name, address)
        print(json.dumps({"role": ROLE, "listen": address}), flush=True)
        return await lifecycle.run_until_stopped(
            server, servicer.inputs.drain, drain_timeout_s=options.drain_timeout_s
        )


def _open(options: EncodeConfig, device: str, probes: Probes) -> EncoderModel:
    from batonlm.encode.model import EncoderModel

    return EncoderModel(
        Path(options.model),
        options.model_name,
        dtype=options.dtype,
        device=device,
        progress=probes.startup.weights,
    )


def _give_way() -> None:
    """Has this thread, and those of torch that it starts, run where nothing else wants to: beside a
    process that answers a chat on the same cores it gets what is left, and alone it loses nothing.
    """
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    return lifecycle.run(serve(config.load(EncodeConfig, prog="baton-encode")))


if __name__ == "__main__":
    sys.exit(main())
