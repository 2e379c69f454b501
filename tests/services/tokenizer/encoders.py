"""A tokenizer's port over an encoder that a test made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.rpc.server import ProcessServer, Service
from batonlm.tokenizer.grammar_checker import Checker
from batonlm.tokenizer.servicer import BatchExecutor, TokenizerServicer
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub, add_TokenizerServicer_to_server


@asynccontextmanager
async def serving(encoder: Any) -> AsyncIterator[tuple[Any, TokenizerServicer]]:
    """A stub, and the servicer that it reaches, which encodes on one thread."""
    with ThreadPoolExecutor(1) as one_thread:
        servicer = TokenizerServicer(
            encoder,
            ModelDescription("m", "", 0, 0, ()),
            lambda: WorkerIdentity("tokenizer", "i" * 32, ""),
            BatchExecutor(one_thread, 1, cores=1),
            Checker(Path(), (), cpu_s=1.0, num_processes=1),
            max_waiting_bytes=1 << 20,
        )
        service = Service(
            "baton.v1.Tokenizer",
            lambda server: add_TokenizerServicer_to_server(servicer, server),
        )
        server = ProcessServer(listen="127.0.0.1:0", services=[service], reflection=False)
        address = await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield TokenizerStub(channel), servicer
        finally:
            await server.stop(0)
