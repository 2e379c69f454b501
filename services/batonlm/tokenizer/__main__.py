"""Starts one tokenizer: parse, wire, serve."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerDescription, WorkerLoad
from batonlm.rpc import config, lifecycle, logs, metrics
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.rpc.server import Probes, ProcessServer, Service
from batonlm.rpc.worker import worker_service
from batonlm.tokenizer.config import TokenizerConfig
from batonlm.tokenizer.encoder import CACHE_BYTES, Encoder, TokenizerFiles, load_tokenizer
from batonlm.tokenizer.grammar_checker import Checker
from batonlm.tokenizer.renderers import RENDER_CPU_S, Renderers
from batonlm.tokenizer.servicer import BatchExecutor, TokenizerServicer, give_way
from batonlm.v1.tokenizer_pb2_grpc import add_TokenizerServicer_to_server

GRAMMAR_CPU_S = 1.0
"""Seconds of CPU time that compiling a grammar may take."""

GRAMMAR_PROCESSES = 2
"""Grammars that are compiled at once; their processes start with the first grammar."""

ROLE = "tokenizer"

log = logging.getLogger(__name__)


async def serve(options: TokenizerConfig) -> int:
    """Runs the process and returns its exit code."""
    instance_id = lifecycle.new_instance_id()
    logs.setup(ROLE, options.log_level, options.log_json, instance_id=instance_id)
    log.info("%s", config.describe(options))
    metrics.tell_role(ROLE)
    probes = options.probes()
    await probes.open()
    probes.startup.enter("tokenizer")
    with ExitStack() as ends:
        options = await asyncio.to_thread(options.with_model, ends, weights=False)
        folder = Path(options.model)
        loaded = await asyncio.to_thread(load_tokenizer, folder)
        digest = tokenizer_digest(folder)
        renderers, client_renderers = (
            ends.enter_context(
                closing(Renderers(cpu_s=RENDER_CPU_S, max_characters=options.max_input_bytes))
            )
            for _ in range(2)
        )
        encoder = await asyncio.to_thread(
            Encoder,
            loaded,
            namespace=digest,
            max_input_bytes=options.max_input_bytes,
            max_cache_bytes=CACHE_BYTES,
            renderers=renderers,
            client_renderers=client_renderers if options.allow_client_templates else None,
            special_tokens_in_text=options.special_tokens_in_text,
        )
        return await _serve(options, probes, instance_id, loaded, digest, encoder)


async def _serve(
    options: TokenizerConfig,
    probes: Probes,
    instance_id: str,
    loaded: TokenizerFiles,
    digest: str,
    encoder: Encoder,
) -> int:
    folder = Path(options.model)
    checker = Checker(
        folder,
        loaded.special_tokens.values(),
        cpu_s=GRAMMAR_CPU_S,
        num_processes=GRAMMAR_PROCESSES,
    )
    model = _model(options, folder, encoder, digest)
    address = ""

    def identity() -> WorkerIdentity:
        return WorkerIdentity(ROLE, instance_id, options.advertise or address)

    def load() -> WorkerLoad:
        return WorkerLoad(servicer.inputs.state, waiting_sequences=servicer.inputs.num)

    # The pool's threads run in parallel; the library must not start more for each call.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cores = len(os.sched_getaffinity(0))
    threads = options.workers or max(2, cores)
    tracer = options.tracer(ROLE, instance_id)
    with (
        closing(tracer),
        ThreadPoolExecutor(threads, "encode") as executor,
        ThreadPoolExecutor(threads, "encode-long", give_way) as long_executor,
    ):
        servicer = TokenizerServicer(
            encoder,
            model,
            identity,
            BatchExecutor(executor, threads, cores, long_executor),
            checker,
            tracer=tracer,
        )
        server = ProcessServer(
            listen=options.listen,
            services=[
                Service(
                    "baton.v1.Tokenizer",
                    lambda server: add_TokenizerServicer_to_server(servicer, server),
                ),
                worker_service(
                    lambda: WorkerDescription(identity(), model, max_sequences=threads), load
                ),
            ],
            probes=probes,
            certificates=options.certificates(),
            token=options.peer_token,
        )
        metrics.gauge(metrics.SEQUENCES, lambda: {("waiting",): servicer.inputs.num})
        address = await server.start()
        server.set_serving(True)
        print(json.dumps({"role": ROLE, "listen": address}), flush=True)
        try:
            return await lifecycle.run_until_stopped(
                server, servicer.inputs.drain, drain_timeout_s=options.drain_timeout_s
            )
        finally:
            await checker.close()


def _model(
    options: TokenizerConfig, folder: Path, encoder: Encoder, digest: str
) -> ModelDescription:
    """The model's description as far as the tokenizer's files contain it."""
    return ModelDescription(
        name=options.model_name or folder.resolve().name,
        digest="",
        max_model_len=0,
        vocab_size=encoder.vocab_size,
        eos_token_ids=(),
        tokenizer_digest=digest,
        answer_format=encoder.answer_format,
    )


def main() -> int:
    return lifecycle.run(serve(config.load(TokenizerConfig, prog="baton-tokenizer")))


if __name__ == "__main__":
    sys.exit(main())
