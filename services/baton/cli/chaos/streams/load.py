"""Asks for streams, so many at a time, and follows them; knows nothing of processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from baton.cli.chaos.streams.answer import Answer
from baton.cli.chaos.streams.workload import Wanted
from baton.v1 import inference_pb2_grpc

TIMEOUT_S = 300.0
PAUSE_S = 0.1
"""Before a router is asked again that refused."""

Stub: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"


@asynccontextmanager
async def stubs_of(addresses: Sequence[str]) -> AsyncIterator[list[Stub]]:
    """One client for each router."""
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        yield [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()


async def follow(stub: Stub, wanted: Wanted, answer: Answer) -> None:
    """Fills in an answer to the stream's end, good or bad."""
    try:
        async for response in stub.Generate(wanted.request, timeout=TIMEOUT_S):
            answer.take(response.event, time.monotonic())
    except grpc.aio.AioRpcError as error:
        answer.failed, answer.words = error.code(), error.details() or ""


class Load:
    """A list of streams once, or over and over until `enough`.

    answers: with the stream's number, as they end. open: those that run, by number of the asking.
    refusals: how often a router that is leaving refused a stream, which the next one then took.
    """

    def __init__(self, stubs: Sequence[Stub], streams: Sequence[Wanted], concurrency: int) -> None:
        self.answers: list[tuple[Wanted, Answer]] = []
        self.open: dict[int, Answer] = {}
        self.refusals = 0
        self._stubs, self._streams, self._concurrency = stubs, streams, concurrency
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
        """A router that refuses a stream before anything came is passed over, as any client with
        more than one address does; a stream that has begun is never asked again."""
        answer = self.open[number] = Answer([time.monotonic()])
        others = len(self._stubs) - 1
        try:
            await follow(self._stubs[number % len(self._stubs)], wanted, answer)
            for turn in range(1, 1 + 2 * others):
                if answer.failed is not grpc.StatusCode.UNAVAILABLE or answer.request_id:
                    break
                self.refusals += 1
                answer.failed, answer.words = None, ""
                await asyncio.sleep(PAUSE_S)
                await follow(self._stubs[(number + turn) % len(self._stubs)], wanted, answer)
        finally:
            del self.open[number]
        self.answers.append((wanted, answer))
