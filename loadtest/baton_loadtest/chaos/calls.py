"""Requests of random tokens to a router, as calls that can be given up; counts nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

TIMEOUT_S = 120


def call(
    stub: inference_pb2_grpc.InferenceStub, draw: random.Random, prompt: int, output: int
) -> Any:
    """A Generate stream of so many tokens. Prompts are drawn, so that nothing is cached."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[draw.randrange(64, 1900) for _ in range(prompt)]),
        options=inference_pb2.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stop=types_pb2.StopParams(max_tokens=output, ignore_eos=True),
            return_token_ids=True,
        ),
    )
    return stub.Generate(request, timeout=TIMEOUT_S)


async def read(stream: Any) -> bool:
    """Reads to the end. False when it failed or was given up with `stream.cancel()`.

    A task that is cancelled while it reads gives up the stream as well.
    """
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError:
        return False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            stream.cancel()
            raise
        return False
    return True
