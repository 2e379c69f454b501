"""The four workers around a measured router, in one process: real gRPC, no model.

They speak the protos, take a fixed time for what they serve, and note how long each piece of it
really took. A prompt's last word is a number that names the request: it is its last token, which
prefill, decode and detokenizer all see. Every output token's text is WORD. Only the KV is not real.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import grpc

from baton.cli.ports import HOST
from baton.core.errors import Unimplemented
from baton.core.request.attempt import AttemptKey
from baton.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from baton.core.routing.load import WorkerDescription, WorkerLoad, WorkerState
from baton.rpc.convert import identity_to_proto, token_ids_from_bytes, token_ids_to_bytes
from baton.rpc.lifecycle import new_instance_id
from baton.rpc.loop import Loop
from baton.rpc.server import ProcessServer, Service
from baton.rpc.worker import worker_service
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)
from baton_loadtest.bench.beside import answer
from baton_loadtest.bench.served import Times

WORD = " baton"
MODEL = ModelDescription("synthetic", "d1", 1 << 24, 1 << 20, (0,), "t1")
LAYOUT = KvLayout("d1", "float32", 1, 1, 8, 8)
NUM_BLOCKS = 1 << 24
HEARTBEAT_S = 0.5
TOKEN = token_ids_to_bytes((1,))

Context = grpc.aio.ServicerContext[Any, Any]
Offers = defaultdict[bytes, asyncio.Event]
"""Set when a hand-over's KV is there."""


class Tokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """One token a word; the last one is the number that it spells."""

    def __init__(self, times: Times) -> None:
        self._times = times

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        *words, name = request.inputs[0].text.split()
        async with self._times.serve("encode", int(name)):
            token_ids = token_ids_to_bytes([*(1 for _ in words), int(name)])
            output = tokenizer_pb2.EncodeOutput(token_ids=token_ids)
        return tokenizer_pb2.EncodeResponse(outputs=[output])

    async def Describe(
        self, request: tokenizer_pb2.DescribeRequest, context: Context
    ) -> tokenizer_pb2.DescribeResponse:
        return tokenizer_pb2.DescribeResponse(model=MODEL.name)

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        raise Unimplemented("synthetic tokens have no text")


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Answers with token 0 of every choice; then its KV may be collected."""

    def __init__(self, times: Times, offers: Offers) -> None:
        self._times, self._offers = times, offers

    async def Run(
        self, request: prefill_pb2.RunRequest, context: Context
    ) -> prefill_pb2.RunResponse:
        async with self._times.serve("prefill", _name(request.attempt)):
            choices = _first_tokens(request.attempt)
        self._offers[request.handover_id].set()
        return prefill_pb2.RunResponse(choices=choices)

    async def Cancel(
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        return prefill_pb2.CancelResponse()


@dataclass(slots=True)
class _Sequence:
    """One choice that decodes. made: tokens since the newest step; sent: of them, on a frame."""

    told: types_pb2.ChoiceTokens
    longest: int
    made: int = 1
    sent: int = 0


class Decode(decode_pb2_grpc.DecodeServicer):
    """Every step makes one token for every sequence. Whatever is unsent when the stream has room
    goes out as one StepFrame, with one entry a sequence.
    """

    def __init__(self, times: Times, offers: Offers) -> None:
        self.instance_id = new_instance_id()
        self.sessions = 0
        """That began; it knows nothing of going on with a broken one."""
        self._times, self._offers = times, offers
        self._step_s = self._next_step = 0.1
        self._running: dict[AttemptKey, list[_Sequence]] = {}
        self._new: list[AttemptKey] = []
        self._woken = asyncio.Event()
        self._started: list[decode_pb2.SequenceStarted] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def pace(self, step_s: float) -> None:
        """From now on a step takes so long."""
        self._step_s = step_s
        self._next_step = asyncio.get_running_loop().time() + step_s
        self._woken.set()

    # The stubs know generators only; a handler that writes by itself is as good.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> None:
        await anext(request_iterator)
        self.sessions += 1
        identity = WorkerIdentity("decode", self.instance_id, "")
        welcome = decode_pb2.SessionWelcome(decode=identity_to_proto(identity))
        await context.write(decode_pb2.SessionResponse(welcome=welcome))
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._write(context.write))
            async for request in request_iterator:
                self._take(request)
            writing.cancel()

    def _take(self, request: decode_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "start":
                task = asyncio.create_task(self._start(request.start))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "cancel":
                self._running.pop(
                    AttemptKey(request.cancel.request_id, request.cancel.attempt), None
                )

    async def _start(self, start: decode_pb2.StartSequence) -> None:
        attempt = start.attempt
        if start.HasField("source"):
            await self._offers[start.source.handover_id].wait()
            del self._offers[start.source.handover_id]
        else:
            async with self._times.serve("prefill", _name(attempt)):
                pass
        key = AttemptKey(attempt.request_id, attempt.attempt)
        self._started.append(
            decode_pb2.SequenceStarted(request_id=key.request_id, attempt=key.attempt)
        )
        longest = attempt.stop.max_tokens
        self._running[key] = [_Sequence(told, longest) for told in _first_tokens(attempt)]
        self._new.append(key)
        self._woken.set()

    async def _write(self, write: Callable[[decode_pb2.SessionResponse], Awaitable[None]]) -> None:
        clock = asyncio.get_running_loop().time
        self._next_step = beat_at = clock()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(self._next_step - clock(), HEARTBEAT_S))):
                    await self._woken.wait()
            self._woken.clear()
            steps = max(0, ceil((clock() - self._next_step) / self._step_s))
            self._next_step += steps * self._step_s
            frame = self._frame(steps)
            if frame.tokens or frame.started:
                await write(decode_pb2.SessionResponse(frame=frame))
            elif clock() - beat_at > HEARTBEAT_S:
                await write(decode_pb2.SessionResponse(heartbeat=decode_pb2.Heartbeat()))
            else:
                continue
            beat_at = clock()

    def _frame(self, steps: int) -> decode_pb2.StepFrame:
        """What so many steps made; of none: what has just started."""
        frame = decode_pb2.StepFrame(started=self._started)
        self._started.clear()
        new, self._new = self._new, []
        for key in list(self._running) if steps else new:
            sequences = self._running.get(key, [])
            for sequence in sequences:
                sequence.made = min(sequence.made + steps, sequence.longest)
                self._tell(frame, sequence)
            if all(sequence.sent == sequence.longest for sequence in sequences):
                self._running.pop(key, None)
        return frame

    def _tell(self, frame: decode_pb2.StepFrame, sequence: _Sequence) -> None:
        unsent = sequence.made - sequence.sent
        if unsent:
            sequence.told.position = sequence.sent
            sequence.told.token_ids = TOKEN * unsent
            sequence.sent = sequence.made
            if sequence.sent == sequence.longest:
                sequence.told.finish_reason = types_pb2.FINISH_REASON_LENGTH
            frame.tokens.append(sequence.told)


class Detokenizer(detokenizer_pb2_grpc.DetokenizerServicer):
    """Answers each message of operations with one of texts, WORD for every token."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._writing = asyncio.Lock()
        self._names: dict[int, int] = {}
        """Of texts that nothing was appended to yet."""

    async def Session(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[detokenizer_pb2.DetokenizerSessionRequest],
        context: Context,
    ) -> None:
        await context.write(detokenizer_pb2.DetokenizerSessionResponse(heartbeat=True))
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(self._beat(context))
            async for request in request_iterator:
                await self._answer(request, context)
            beating.cancel()

    async def _answer(
        self, request: detokenizer_pb2.DetokenizerSessionRequest, context: Context
    ) -> None:
        response = detokenizer_pb2.DetokenizerSessionResponse()
        new = []
        for operation in request.operations:
            match operation.WhichOneof("operation"):
                case "open":
                    tail = token_ids_from_bytes(operation.open.prompt_tail_ids, "prompt_tail_ids")
                    self._names[operation.text_id] = tail[-1]
                case "append":
                    if operation.append.position == 0:
                        new.append(self._names.pop(operation.text_id))
                    self._say(response, operation)
        if new:
            async with self._times.serve("detokenize", *new):
                pass
        if response.deltas:
            await self._write(response, context)

    def _say(
        self,
        response: detokenizer_pb2.DetokenizerSessionResponse,
        operation: detokenizer_pb2.DetokenizeOperation,
    ) -> None:
        append = operation.append
        count = len(append.token_ids) // 4
        response.deltas.add(
            text_id=operation.text_id,
            text=WORD * count,
            num_tokens=append.position + count,
            searched_tokens=append.position + count,
            end=append.last,
        )

    async def _beat(self, context: Context) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            beat = detokenizer_pb2.DetokenizerSessionResponse(heartbeat=True)
            await self._write(beat, context)

    async def _write(
        self, response: detokenizer_pb2.DetokenizerSessionResponse, context: Context
    ) -> None:
        async with self._writing:
            await context.write(response)


def _name(attempt: types_pb2.Attempt) -> int:
    return token_ids_from_bytes(attempt.token_ids[-4:], "attempt.token_ids")[0]


def _first_tokens(attempt: types_pb2.Attempt) -> list[types_pb2.ChoiceTokens]:
    return [
        types_pb2.ChoiceTokens(
            request_id=attempt.request_id,
            choice=choice,
            attempt=attempt.attempt,
            token_ids=TOKEN,
        )
        for choice in attempt.choices
    ]


class Workers:
    """The four of them, each with a server of its own."""

    def __init__(self) -> None:
        self.times = Times()
        self.offers: Offers = defaultdict(asyncio.Event)
        self.decode = Decode(self.times, self.offers)
        self._servers: list[ProcessServer] = []

    async def open(self, serve_s: float) -> dict[str, str]:
        """serve_s: what everything takes. Returns their addresses by role."""
        self.times.serve_s = serve_s
        servicers = {
            "tokenizer": Tokenizer(self.times),
            "prefill": Prefill(self.times, self.offers),
            "decode": self.decode,
            "detokenizer": Detokenizer(self.times),
        }
        return {role: await self._serve(role, servicer) for role, servicer in servicers.items()}

    async def _serve(self, role: str, servicer: Any) -> str:
        instance_id = self.decode.instance_id if role == "decode" else new_instance_id()
        description = WorkerDescription(
            WorkerIdentity(role, instance_id, ""),
            MODEL,
            LAYOUT if role in ("prefill", "decode") else None,
            num_blocks=NUM_BLOCKS,
            block_size=16,
        )
        load = WorkerLoad(WorkerState.SERVING, free_blocks=NUM_BLOCKS)
        register = _REGISTER[role]
        server = ProcessServer(
            listen=f"{HOST}:0",
            services=[
                Service(f"baton.v1.{role.title()}", lambda server: register(servicer, server)),
                worker_service(lambda: description, lambda: load),
            ],
            reflection=False,
        )
        address = await server.start()
        server.set_serving(True)
        self._servers.append(server)
        return address


_REGISTER: dict[str, Callable[[Any, grpc.aio.Server], None]] = {
    "tokenizer": tokenizer_pb2_grpc.add_TokenizerServicer_to_server,
    "prefill": prefill_pb2_grpc.add_PrefillServicer_to_server,
    "decode": decode_pb2_grpc.add_DecodeServicer_to_server,
    "detokenizer": detokenizer_pb2_grpc.add_DetokenizerServicer_to_server,
}


async def _main() -> None:
    workers = Workers()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "open":
                return await workers.open(command["serve_s"])
            case "step":
                workers.decode.pace(command["step_s"])
                return {}
            case "sessions":
                return {"sessions": workers.decode.sessions}
            case _:
                return workers.times.take()

    await answer(handle)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(_main())
