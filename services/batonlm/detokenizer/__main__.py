"""Starts one detokenizer: parse, wire, serve."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerState
from batonlm.detokenizer.config import DetokenizerConfig
from batonlm.detokenizer.servicer import DetokenizerServicer
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.rpc import config, lifecycle, logs, metrics
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.rpc.server import ProcessServer, Service
from batonlm.rpc.worker import worker_service
from batonlm.v1.detokenizer_pb2_grpc import add_DetokenizerServicer_to_server

ROLE = "detokenizer"

MAX_TEXTS = 16_384
"""Most texts that are open in one session; more are refused. Ten times the requests of a router."""

MAX_UNSENT_BYTES = 64 << 20
"""What a router may leave unread before its session ends: seconds of all its texts."""

log = logging.getLogger(__name__)


async def serve(options: DetokenizerConfig) -> int:
    """Runs the process and returns its exit code."""
    with ExitStack() as ends:
        return await _serve(options, ends)


async def _serve(options: DetokenizerConfig, ends: ExitStack) -> int:
    instance_id = lifecycle.new_instance_id()
    logs.setup(ROLE, options.log_level, options.log_json, instance_id=instance_id)
    log.info("%s", config.describe(options))
    metrics.tell_role(ROLE)
    probes = options.probes()
    await probes.open()
    probes.startup.enter("tokenizer")
    options = await asyncio.to_thread(options.with_model, ends, weights=False)
    folder = Path(options.model)
    tracer = options.tracer(ROLE, instance_id)
    servicer = DetokenizerServicer(
        await asyncio.to_thread(Vocabulary.load, folder),
        max_texts=MAX_TEXTS,
        max_unsent_bytes=MAX_UNSENT_BYTES,
        tracer=tracer,
    )
    model = _model(options, folder)
    address = ""

    def describe() -> WorkerDescription:
        identity = WorkerIdentity(ROLE, instance_id, options.advertise or address)
        return WorkerDescription(identity, model)

    def load() -> WorkerLoad:
        state = WorkerState.DRAINING if servicer.draining else WorkerState.SERVING
        return WorkerLoad(state, running_sequences=servicer.num_texts)

    server = ProcessServer(
        listen=options.listen,
        services=[
            Service(
                "baton.v1.Detokenizer",
                lambda server: add_DetokenizerServicer_to_server(servicer, server),
            ),
            worker_service(describe, load),
        ],
        probes=probes,
        certificates=options.certificates(),
        token=options.peer_token,
    )
    metrics.gauge(metrics.STREAMS, lambda: {(ROLE,): servicer.num_sessions})
    metrics.gauge(metrics.SEQUENCES, lambda: {("running",): servicer.num_texts})
    address = await server.start()
    server.set_serving(True)
    print(json.dumps({"role": ROLE, "listen": address}), flush=True)
    ends.callback(tracer.close)
    return await lifecycle.run_until_stopped(
        server, servicer.drain, drain_timeout_s=options.drain_timeout_s
    )


def _model(options: DetokenizerConfig, folder: Path) -> ModelDescription:
    """The model's description as far as the tokenizer's files contain it."""
    return ModelDescription(
        name=options.model_name or folder.resolve().name,
        digest="",
        max_model_len=0,
        vocab_size=0,
        eos_token_ids=(),
        tokenizer_digest=tokenizer_digest(folder),
    )


def main() -> int:
    return lifecycle.run(serve(config.load(DetokenizerConfig, prog="baton-detokenizer")))


if __name__ == "__main__":
    sys.exit(main())
