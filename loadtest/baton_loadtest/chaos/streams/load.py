"""Asks for streams, so many at a time, and follows them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2_grpc
from baton_loadtest.chaos.streams.answer import Answer
from baton_loadtest.chaos.streams.workload import Wanted

TIMEOUT_S = 300.0

SERVICE = "baton.v1.Inference"
CLIENT = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE},
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
"""A gRPC client of several routers, as any should be made: it asks those that call themselves well,
and once more when it was refused before the first event. A stream that has begun is never retried.
"""

Stub: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"


@asynccontextmanager
async def client_of(routers: Sequence[str]) -> AsyncIterator[Stub]:
    """One client of all these addresses (host:port)."""
    options = (
        ("grpc.service_config", json.dumps(CLIENT)),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )
    target = f"ipv4:{','.join(routers)}"
    async with open_channel(target, plain=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def follow(stub: Stub, wanted: Wanted, answer: Answer) -> None:
    """Fills in an answer to the stream's end, good or bad."""
    try:
        async for response in stub.Generate(wanted.request, timeout=TIMEOUT_S):
            answer.take(response.event, time.monotonic())
    except grpc.aio.AioRpcError as error:
        answer.failed, answer.words = error.code(), error.details() or ""


class Load:
    """A list of streams once, or over and over until `enough`.

    answers: in the order in which they end. open: those that run, by the number of their asking.
    """

    def __init__(self, stub: Stub, streams: Sequence[Wanted], concurrency: int) -> None:
        self.answers: list[tuple[Wanted, Answer]] = []
        self.open: dict[int, Answer] = {}
        self._stub, self._streams, self._concurrency = stub, streams, concurrency
        self._enough = False

    async def once(self) -> list[Answer]:
        """Every stream once; their answers in their order."""
        await self._run(iter(self._streams))
        by_number = {wanted.number: answer for wanted, answer in self.answers}
        return [by_number[wanted.number] for wanted in self._streams]

    @asynccontextmanager
    async def on_and_on(self) -> AsyncIterator[None]:
        """Streams run while the block does; on leaving, those that run are followed to the end."""
        running = asyncio.create_task(self._run(itertools.cycle(self._streams)))
        try:
            await self.under_way(running)
            yield
        except BaseException:
            running.cancel()
            raise
        finally:
            self._enough = True
            await asyncio.wait([running])
        running.result()

    async def under_way(self, running: asyncio.Task[None] | asyncio.Task[list[Answer]]) -> None:
        """Returns when as many streams as run at a time have tokens, or have ended."""
        while not running.done():
            begun = sum(bool(answer.tokens) for answer in self.open.values())
            if begun + len(self.answers) >= min(self._concurrency, len(self._streams)):
                return
            await asyncio.sleep(0.02)

    async def _run(self, streams: Iterator[Wanted]) -> None:
        numbers = itertools.count()

        async def worker() -> None:
            for wanted in streams:
                if self._enough:
                    return
                await self._ask(next(numbers), wanted)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(worker())

    async def _ask(self, number: int, wanted: Wanted) -> None:
        answer = self.open[number] = Answer([time.monotonic()])
        try:
            await follow(self._stub, wanted, answer)
        finally:
            del self.open[number]
        self.answers.append((wanted, answer))
