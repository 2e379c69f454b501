"""One tokenizer or detokenizer process under load, and the processor time it took.

The process has a core of its own; whoever asks it runs on another one where the machine has two.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.core.errors import BatonError
from baton.rpc.convert import token_ids_to_bytes
from baton.rpc.lifecycle import PARENT_VARIABLE
from baton.rpc.transport import open_channel
from baton.v1 import detokenizer_pb2, tokenizer_pb2
from baton.v1.detokenizer_pb2_grpc import DetokenizerStub
from baton.v1.tokenizer_pb2_grpc import TokenizerStub
from baton_loadtest.bench.process import ContenderFailed, cpu_spent_s

START_S = 60.0
STEPS_AHEAD = 4
"""Of all texts, that may be without an answer: as many as a decode worker runs ahead."""


@dataclass(frozen=True, slots=True)
class Worker:
    """The running process, and a channel to it."""

    pid: int
    channel: grpc.aio.Channel

    def spent_s(self) -> float:
        """User and system time of all its threads so far."""
        return cpu_spent_s(self.pid)


@dataclass(frozen=True, slots=True)
class Load:
    """What a stretch of work took. amount: bytes or tokens; seconds: of the clock."""

    amount: int
    seconds: float
    spent_s: float

    @property
    def per_core_s(self) -> float:
        return self.amount / self.spent_s

    @property
    def per_s(self) -> float:
        return self.amount / self.seconds


@asynccontextmanager
async def serving(role: str, model: Path, core: int, *flags: str) -> AsyncIterator[Worker]:
    """A worker that serves. Raises ContenderFailed."""
    pin = ["taskset", "-c", str(core)] if shutil.which("taskset") else []
    process = await asyncio.create_subprocess_exec(
        *(*pin, sys.executable, "-m", f"baton.{role}", "--model", str(model)),
        *("--log-level", "warning", *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line:
            raise ContenderFailed(f"the {role} did not start")
        address = json.loads(line)["listen"]
        async with open_channel(address) as channel:
            await channel.channel_ready()
            yield Worker(process.pid, channel)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def encode(
    workers: Sequence[Worker],
    requests: Sequence[tokenizer_pb2.EncodeRequest],
    *,
    streams: int,
    seconds: float,
) -> Load:
    """Every stream asks one worker for one request after the other, until the time is up."""

    async def stream(number: int, until: float) -> int:
        stub = TokenizerStub(workers[number % len(workers)].channel)
        done, turn = 0, number
        while asyncio.get_running_loop().time() < until:
            request = requests[turn % len(requests)]
            turn += streams
            done += await encoded_bytes(stub, request)
        return done

    return await _measured(workers, stream, streams, seconds)


async def encoded_bytes(stub: Any, request: tokenizer_pb2.EncodeRequest) -> int:
    """Bytes of text, encoded. Raises BatonError when an input was refused."""
    answer = await stub.Encode(request)
    if any(output.HasField("error") for output in answer.outputs):
        raise BatonError("the tokenizer refused a text")
    return sum(len(item.text.encode()) for item in request.inputs)


async def detokenize(
    worker: Worker,
    ids: Sequence[int],
    *,
    streams: int,
    seconds: float,
    stop_strings: Sequence[str] = (),
) -> Load:
    """Every step appends one token to each of so many texts of one session."""

    async def session(_: int, until: float) -> int:
        return await _Session(worker.channel, ids, streams, stop_strings).run(until)

    return await _measured([worker], session, 1, seconds)


class _Session:
    """A router's side of one session."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        ids: Sequence[int],
        streams: int,
        stop_strings: Sequence[str],
    ) -> None:
        self._call = DetokenizerStub(channel).Session()
        self._tokens = [token_ids_to_bytes([token_id]) for token_id in ids]
        self._streams = streams
        self._stops = stop_strings
        self._told = [0] * streams
        """Tokens of each text that are sent or held for a stop string."""
        self._total = 0
        self._news = asyncio.Event()

    async def run(self, until: float) -> int:
        """Tokens that were answered for. Raises BatonError when a text fails or ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(self._read())
        try:
            await self._call.write(self._opened())
            position = 0
            while loop.time() < until:
                await self._call.write(self._step(position))
                position += 1
                while (position - STEPS_AHEAD) * self._streams > self._total:
                    if reader.done():
                        reader.result()
                    self._news.clear()
                    await self._news.wait()
            return self._total
        finally:
            self._call.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _opened(self) -> detokenizer_pb2.DetokenizerSessionRequest:
        message = detokenizer_pb2.OpenText(skip_special_tokens=True, stop_strings=self._stops)
        return detokenizer_pb2.DetokenizerSessionRequest(
            operations=[
                detokenizer_pb2.DetokenizeOperation(text_id=number, open=message)
                for number in range(self._streams)
            ]
        )

    def _step(self, position: int) -> detokenizer_pb2.DetokenizerSessionRequest:
        tokens, count = self._tokens, len(self._tokens)
        return detokenizer_pb2.DetokenizerSessionRequest(
            operations=[
                detokenizer_pb2.DetokenizeOperation(
                    text_id=number,
                    append=detokenizer_pb2.AppendTokens(
                        position=position, token_ids=tokens[(position + 61 * number) % count]
                    ),
                )
                for number in range(self._streams)
            ]
        )

    async def _read(self) -> None:
        try:
            async for response in self._call:
                for delta in response.deltas:
                    if delta.end or delta.HasField("error"):
                        raise BatonError("a text ended that must not")
                    told = max(delta.num_tokens, delta.searched_tokens)
                    self._total += told - self._told[delta.text_id]
                    self._told[delta.text_id] = told
                self._news.set()
        finally:
            self._news.set()


async def _measured(
    workers: Sequence[Worker],
    stream: Callable[[int, float], Coroutine[Any, Any, int]],
    streams: int,
    seconds: float,
) -> Load:
    loop = asyncio.get_running_loop()
    # What is made once, on the first input of a kind, is no part of it.
    await asyncio.gather(*(stream(number, loop.time() + seconds / 8) for number in range(streams)))
    spent, began = sum(worker.spent_s() for worker in workers), loop.time()
    done = await asyncio.gather(*(stream(number, began + seconds) for number in range(streams)))
    took = loop.time() - began
    return Load(sum(done), took, sum(worker.spent_s() for worker in workers) - spent)
