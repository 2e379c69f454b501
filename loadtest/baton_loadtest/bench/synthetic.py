"""Scripted workers of the four roles, without a model, in one process around a measured router.

Each piece of work takes a fixed time, and the actual time is recorded. A prompt's last word is a
number that identifies the request: it is its last token, which prefill, decode and detokenizer all
receive. Every output token's text is WORD.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from math import ceil
from time import perf_counter
from typing import Any

from baton_loadtest.child import answer
from batonlm.core.request.attempt import AttemptKey
from batonlm.core.request.model import KvLayout, ModelDescription
from batonlm.rpc.convert import token_ids_from_bytes, token_ids_to_bytes
from batonlm.testing.scripted import (
    HEARTBEAT_S,
    Context,
    ScriptedDecode,
    ScriptedDetokenizer,
    ScriptedKv,
    ScriptedPrefill,
    ScriptedTokenizer,
    ScriptedWorker,
)
from batonlm.v1 import decode_pb2, detokenizer_pb2, prefill_pb2, tokenizer_pb2, types_pb2

WORD = " baton"
MODEL = ModelDescription("synthetic", "d1", 1 << 24, 1 << 20, (0,), "t1")
LAYOUT = KvLayout("d1", "float32", 1, 1, 8, 8)
NUM_BLOCKS = 1 << 24
TOKEN = token_ids_to_bytes((1,))


class Times:
    """The seconds of each request's work, by kind. serve_s: the additional time of all work."""

    def __init__(self) -> None:
        self.serve_s = 0.0
        self._spent: defaultdict[str, dict[int, float]] = defaultdict(dict)

    @asynccontextmanager
    async def serve(self, what: str, *requests: int) -> AsyncIterator[None]:
        """Runs the block, waits serve_s, and records how long both took."""
        began = perf_counter()
        yield
        if self.serve_s:
            await asyncio.sleep(self.serve_s)
        for request in requests:
            self._spent[what][request] = perf_counter() - began

    def take(self) -> dict[str, dict[int, float]]:
        spent, self._spent = self._spent, defaultdict(dict)
        return spent


class Tokenizer(ScriptedTokenizer):
    """One token per word; the last one is the number that it spells."""

    def __init__(self, times: Times) -> None:
        super().__init__(model=MODEL)
        self._times = times

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        *words, name = request.inputs[0].text.split()
        async with self._times.serve("encode", int(name)):
            token_ids = token_ids_to_bytes([*(1 for _ in words), int(name)])
            output = tokenizer_pb2.EncodeOutput(token_ids=token_ids)
        return tokenizer_pb2.EncodeResponse(outputs=[output])


class Prefill(ScriptedPrefill):
    """Responds with token 0 of every choice; then its KV may be collected."""

    def __init__(self, network: ScriptedKv, times: Times) -> None:
        super().__init__(network, model=MODEL, layout=LAYOUT)
        self._times = times

    async def Run(
        self, request: prefill_pb2.RunRequest, context: Context
    ) -> prefill_pb2.RunResponse:
        async with self._times.serve("prefill", _name(request.attempt)):
            choices = _first_tokens(request.attempt)
        self.network.offer(request.handover_id).set_result([])
        return prefill_pb2.RunResponse(choices=choices)


class _Sequence:
    """One choice that decodes."""

    __slots__ = ("longest", "made", "sent", "tokens")

    def __init__(self, tokens: types_pb2.ChoiceTokens, longest: int) -> None:
        self.tokens = tokens
        self.longest = longest
        self.made = 1
        """Number of tokens, as of the newest step."""
        self.sent = 0
        """Number of tokens that were sent in a frame."""


class Decode(ScriptedDecode):
    """Every step makes one token per sequence. When the stream has room, all unsent tokens are sent
    as one StepFrame with one entry per sequence.
    """

    def __init__(self, network: ScriptedKv, times: Times) -> None:
        super().__init__(network, model=MODEL, layout=LAYOUT)
        self.step_s = self._next_step = 0.1
        self._times = times
        self._decoding: dict[AttemptKey, list[_Sequence]] = {}
        self._new: list[AttemptKey] = []
        self._started: list[decode_pb2.SequenceStarted] = []
        self._woken = asyncio.Event()

    def pace(self, step_s: float) -> None:
        """Sets the duration of a step."""
        self.step_s = step_s
        self._next_step = asyncio.get_running_loop().time() + step_s
        self._woken.set()

    def begin(self, start: decode_pb2.StartSequence, router: str) -> None:
        task = asyncio.create_task(self.prefill(start))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def prefill(self, start: decode_pb2.StartSequence) -> None:
        attempt = start.attempt
        if start.HasField("source"):
            await self.network.offer(start.source.handover_id)
            del self.network.given[start.source.handover_id]
        else:
            async with self._times.serve("prefill", _name(attempt)):
                pass
        key = AttemptKey(attempt.request_id, attempt.attempt)
        self._started.append(
            decode_pb2.SequenceStarted(request_id=key.request_id, attempt=key.attempt)
        )
        longest = attempt.stop.max_tokens
        self._decoding[key] = [_Sequence(tokens, longest) for tokens in _first_tokens(attempt)]
        self._new.append(key)
        self._woken.set()

    def _cancel(self, key: AttemptKey, choices: tuple[int, ...]) -> None:
        self._decoding.pop(key, None)

    async def _until_step(self) -> None:
        left_s = self._next_step - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(left_s, HEARTBEAT_S))):
                await self._woken.wait()
        self._woken.clear()

    def _step(self, router: str) -> decode_pb2.StepFrame:
        now = asyncio.get_running_loop().time()
        steps = max(0, ceil((now - self._next_step) / self.step_s))
        self._next_step += steps * self.step_s
        return self.frame(steps)

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        self._next_step = asyncio.get_running_loop().time()
        return await super().start(listen)

    def frame(self, steps: int) -> decode_pb2.StepFrame:
        """Returns the frame of so many steps; of none: of what has just started."""
        frame = decode_pb2.StepFrame(started=self._started)
        self._started.clear()
        new, self._new = self._new, []
        for key in list(self._decoding) if steps else new:
            sequences = self._decoding.get(key, [])
            for sequence in sequences:
                sequence.made = min(sequence.made + steps, sequence.longest)
                _send(frame, sequence)
            if all(sequence.sent == sequence.longest for sequence in sequences):
                self._decoding.pop(key, None)
        return frame


def _send(frame: decode_pb2.StepFrame, sequence: _Sequence) -> None:
    unsent = sequence.made - sequence.sent
    if unsent:
        sequence.tokens.position = sequence.sent
        sequence.tokens.token_ids = TOKEN * unsent
        sequence.sent = sequence.made
        if sequence.sent == sequence.longest:
            sequence.tokens.finish_reason = types_pb2.FINISH_REASON_LENGTH
        frame.tokens.append(sequence.tokens)


class Detokenizer(ScriptedDetokenizer):
    """Responds with WORD for every token."""

    def __init__(self, times: Times) -> None:
        super().__init__(model=MODEL)
        self._times = times

    async def _serve(self, keys: Sequence[tuple[int, int]]) -> None:
        texts = [self.texts[key] for key in keys]
        new = [text.opening for text in texts if text.token_ids and not text.sent]
        if new:
            tails = [token_ids_from_bytes(one.prompt_tail_ids, "prompt_tail_ids") for one in new]
            async with self._times.serve("detokenize", *(tail[-1] for tail in tails)):
                pass

    def _delta(self, session: int, text_id: int) -> detokenizer_pb2.TextDelta:
        text = self.texts[session, text_id]
        count = len(text.token_ids)
        fresh, text.sent = count - text.sent, count
        if text.last:
            del self.texts[session, text_id]
        return detokenizer_pb2.TextDelta(
            text_id=text_id,
            text=WORD * fresh,
            num_tokens=count,
            searched_tokens=count,
            end=text.last,
        )


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
    """The workers, each with its own server."""

    def __init__(self) -> None:
        self.times = Times()
        network = ScriptedKv()
        self.decode = Decode(network, self.times)
        self._all: list[ScriptedWorker] = [
            Tokenizer(self.times),
            Prefill(network, self.times),
            self.decode,
            Detokenizer(self.times),
        ]

    async def open(self, serve_s: float) -> dict[str, str]:
        """serve_s: the additional time of all work. Returns the addresses by role."""
        self.times.serve_s = serve_s
        for worker in self._all:
            worker.num_blocks = worker.free_blocks = NUM_BLOCKS
        return {worker.role: await worker.start() for worker in self._all}


async def serve_workers() -> None:
    """do="open" with serve_s is answered with the workers' addresses by role; "step" sets step_s;
    "sessions" is answered with their number, and "times" with the times of each request's work."""
    workers = Workers()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "open":
                return await workers.open(command["serve_s"])
            case "step":
                workers.decode.pace(command["step_s"])
                return {}
            case "sessions":
                return {"sessions": len(workers.decode.hellos)}
            case _:
                return workers.times.take()

    await answer(handle)
