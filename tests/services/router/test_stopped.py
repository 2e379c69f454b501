"""A router process that was stopped for longer than any worker may be silent loses nothing."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from batonlm.testing import language
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc, types_pb2
from tests.services.router.conftest import World
from tests.services.router.router_process import router_process

PROMPT = "the cat sat on the mat"
TOKENS = 400
STEP_S = 0.01
STOPPED_S = 3.0
STREAMS = 4


class Reading:
    """One stream, and how far it has come."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, seed: int) -> None:
        self.token_ids: list[int] = []
        self.expected, _ = language.answer(tuple(PROMPT.encode()), seed, 0, TOKENS, ignore_eos=True)
        options = pb.GenerationOptions(
            sampling=types_pb2.SamplingParams(seed=seed),
            stop=types_pb2.StopParams(max_tokens=TOKENS, ignore_eos=True),
            return_token_ids=True,
        )
        self._call = stub.Generate(pb.GenerateRequest(text=PROMPT, options=options), timeout=120)
        self.begun = asyncio.Event()

    async def read(self) -> None:
        async for answer in self._call:
            self.token_ids += answer.event.delta.token_ids
            if len(self.token_ids) >= 20:
                self.begun.set()


@pytest.mark.deep
async def test_a_router_that_was_stopped_takes_no_worker_for_dead(world: World) -> None:
    world.add(decodes=2)
    for decode in world.decodes:
        decode.step_s = STEP_S
    async with (
        router_process(world) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        streams = [Reading(stub, seed) for seed in range(STREAMS)]
        reading = asyncio.gather(*(stream.read() for stream in streams))
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        router.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
            assert not any(len(stream.token_ids) >= TOKENS for stream in streams)
        finally:
            router.signal(signal.SIGCONT)
        await reading
        for stream in streams:
            assert tuple(stream.token_ids) == stream.expected
        told = await router.metrics()
    assert (told["baton_migrations_total"], told["baton_retries_total"]) == (0, 0)
    assert told["baton_loop_stalls_total"] >= 1
    assert told["baton_loop_stalled_seconds_total"] > STOPPED_S - 1
    assert [len(decode.hellos) for decode in world.decodes] == [1, 1]
    assert all(start.attempt == 0 for decode in world.decodes for start in decode.starts)
