"""`baton bench tokens`: tokenizer and detokenizer workers against the same library in one process.

Both sides of a figure are measured in turns, pinned to the same core, and compared by CPU time; the
client runs on another core if the machine has two. The text is the source of Python's standard
library, which has prose and code and is available everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from tokenizers import Tokenizer

from baton_loadtest.bench.options import MODEL, option
from baton_loadtest.launch import BatonProcess, call, check_cpu_clock, cores, process, say
from baton_loadtest.report import Chart, Line, Report, Result, at_most, compared
from batonlm.cli.layout import resolve_model
from batonlm.core.errors import BatonError
from batonlm.rpc.channels import open_channel
from batonlm.rpc.convert import token_ids_to_bytes
from batonlm.v1 import detokenizer_pb2
from batonlm.v1.detokenizer_pb2_grpc import DetokenizerStub
from batonlm.v1.tokenizer_pb2 import Chat, ChatMessage, EncodeInput, EncodeRequest
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub

PLOTS = True
OPTIONS = (
    MODEL,
    option("--sizes", tuple(4**n for n in range(4, 11)), "bytes of text in a request"),
    option("--streams", (1, 4, 16, 64, 256), "at once"),
    option("--seconds", 1.5, "that each point is measured for"),
)

TEXT_BYTES = 1 << 22
ITEM_BYTES = 1 << 10
"""Size of the texts in a batch; larger if more than 256 would be needed."""

MAX_ITEMS = 256
COMPARED_FROM = 1 << 16
GOAL = 0.8
STREAM_BYTES = 1 << 12
DIRECT_S = 120.0
TURNS = 3
"""Measurements of each side of a figure, of which the median counts."""

STOPS = ("\n\n\n\n", "</answer>", "User:")
STEPS_AHEAD = 4
"""Steps of all texts that may be unanswered: as many as a decode worker runs ahead."""

LARGEST = 1 << 20
"""Bytes of text; a tokenizer's default limit."""

HARD_CPU_S = 4.0
BESIDE_MS = 250.0
BESIDE_PAUSE_S = 0.02
HARD = {
    "one letter": "a",
    "spaces": " ",
    "line ends": "\n",
    "digits": "1",
    "NUL": "\0",
    "one word": "thequickbrownfox",
    "combining marks": "e" + "\u0301\u0302\u0303" * 8,
    "joined emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "half-open tokens": "<|",
}
CHAT_TURNS = 40
TURN_CHARACTERS = 2000


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if a worker fails."""
    check_cpu_clock()
    allowed = os.sched_getaffinity(0)
    try:
        return asyncio.run(_TokensBench(args).measure())
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True, slots=True)
class TokensWorker:
    """A running tokenizer or detokenizer process, and a channel to it."""

    process: BatonProcess
    channel: grpc.aio.Channel

    def spent_s(self) -> float:
        return self.process.spent_s()


@asynccontextmanager
async def _serving(
    role: str, model: Path, core: int, constants: str = ""
) -> AsyncIterator[TokensWorker]:
    """Raises ContenderFailed."""
    async with (
        process(role, "--model", str(model), core=core, constants=constants) as started,
        open_channel(started.announced["listen"]) as channel,
    ):
        await channel.channel_ready()
        yield TokensWorker(started, channel)


class _TokensBench:
    """Runs the measurements in order; each adds its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = resolve_model(args.model)[0]
        self._text = _text()
        self._cores = cores()
        self._core, self._other = self._cores[0], self._cores[-1]
        # Tokens of the text, none of which ends a sequence.
        start = random.Random(0).randrange(len(self._text) // 2)
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        text = self._text[start : start + (1 << 15)]
        self._ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
        self.results: list[Result] = []

    async def measure(self) -> Report:
        decode_direct = (await self._direct({}, self._ids))["decode"]
        os.sched_setaffinity(0, {self._other})
        async with _serving("tokenizer", self._model, self._core) as first:
            by_size, encode_direct = await self._sizes(first)
            by_streams = await self._streams(first)
            self.results += await _hard_texts(first)
            async with _serving("tokenizer", self._model, self._other) as second:
                await self._two(first, second)
        await self._growing_chat()
        decoded, with_stops = await self._decoding(decode_direct)
        sizes, streams = list(self._args.sizes), list(self._args.streams)
        library = "the library, called directly"
        charts = (
            Chart(
                "encoding, one request at a time",
                "bytes of text in a request",
                "MB a CPU-second",
                (
                    Line(library, sizes, _mb(encode_direct)),
                    Line("a tokenizer worker", sizes, _mb(by_size)),
                ),
                log=True,
            ),
            Chart(
                f"encoding, {STREAM_BYTES >> 10} KiB a request",
                "streams",
                "MB a CPU-second",
                (Line("a tokenizer worker", streams, _mb(by_streams)),),
                log=True,
            ),
            Chart(
                "detokenizing, a token of each stream at a time",
                "streams",
                "tokens a CPU-second",
                (
                    Line("a detokenizer worker", streams, decoded),
                    Line("with stop strings", streams, with_stops),
                    Line(library, streams, [decode_direct] * len(streams)),
                ),
                log=True,
            ),
        )
        return Report(self.results, charts)

    async def _direct(self, batches: dict[int, list[list[str]]], ids: list[int]) -> dict[str, Any]:
        """Returns the library's rates, on the core that the workers use."""
        job = {
            "tokenizer": str(self._model / "tokenizer.json"),
            "batches": batches,
            "ids": ids,
            "seconds": self._args.seconds,
        }
        os.sched_setaffinity(0, self._cores)
        try:
            return await asyncio.to_thread(call, run_library, job, threads=1, deadline_s=DIRECT_S)
        finally:
            os.sched_setaffinity(0, {self._other})

    async def _sizes(self, worker: TokensWorker) -> tuple[list[float], list[float]]:
        """Returns bytes per CPU-second by size of a request: the worker's, and the library's."""
        rates, direct = [], []
        for size in self._args.sizes:
            say(f"requests of {size} bytes")
            batches = batches_of(self._text, size)
            requests = [_request(batch) for batch in batches]
            ours, theirs = [], []
            for _ in range(TURNS):
                theirs.append((await self._direct({size: batches}, []))["encode"][str(size)])
                work = await _encode([worker], requests, streams=1, seconds=self._args.seconds)
                ours.append(work.per_core_s)
            rates.append(median(ours))
            direct.append(median(theirs))
            self.results.append(
                compared(
                    f"encoding, {_size(size)} a request, against the library called directly",
                    rates[-1] / 1e6,
                    "MB/CPU-s",
                    direct[-1] / 1e6,
                    GOAL if size >= COMPARED_FROM else None,
                )
            )
        rows = zip(self._args.sizes, rates, direct, strict=True)
        enough = [size for size, rate, of_direct in rows if rate >= GOAL * of_direct]
        if enough:
            name = f"smallest request measured that reaches {GOAL:.0%} of the library"
            self.results.append(Result(name, min(enough), "bytes"))
        return rates, direct

    async def _streams(self, worker: TokensWorker) -> list[float]:
        """Returns bytes per CPU-second by the number of concurrent streams."""
        requests = [_request(batch) for batch in batches_of(self._text, STREAM_BYTES)]
        rates = []
        for streams in self._args.streams:
            say(f"{streams} streams")
            work = await _encode([worker], requests, streams=streams, seconds=self._args.seconds)
            rates.append(work.per_core_s)
            name = f"encoding, {_size(STREAM_BYTES)} a request, {_streams(streams)}"
            self.results.append(Result(name, work.per_core_s / 1e6, "MB/CPU-s"))
        return rates

    async def _two(self, first: TokensWorker, second: TokensWorker) -> None:
        say("one worker, then two")
        requests = [_request(batch) for batch in batches_of(self._text, COMPARED_FROM)]
        one, two = [
            await _encode(workers, requests, streams=4, seconds=2 * self._args.seconds)
            for workers in ([first], [first, second])
        ]
        name = f"encoding, {_size(COMPARED_FROM)} a request, two workers against one"
        rates = [work.amount / work.seconds / 1e6 for work in (one, two)]
        self.results.append(compared(name, rates[1], "MB/s", rates[0]))

    async def _growing_chat(self) -> None:
        """A conversation that is encoded again with each turn, with and without the cache."""
        rates = []
        for constants in ("", "batonlm.tokenizer.__main__.CACHE_BYTES=0"):
            say(f"a growing chat{', without the cache' if constants else ''}")
            async with _serving("tokenizer", self._model, self._core, constants) as worker:
                before = worker.spent_s()
                messages: list[ChatMessage] = []
                for turn in range(CHAT_TURNS):
                    text = self._text[turn * TURN_CHARACTERS : (turn + 1) * TURN_CHARACTERS]
                    messages.append(ChatMessage(role=("user", "assistant")[turn % 2], content=text))
                    chat = Chat(messages=messages, add_generation_prompt=True)
                    await _encoded_bytes(worker, EncodeRequest(inputs=[EncodeInput(chat=chat)]))
                rates.append(CHAT_TURNS / (worker.spent_s() - before))
        name = f"chat of {CHAT_TURNS} turns, {TURN_CHARACTERS} characters each: cached against not"
        self.results.append(compared(name, rates[0], "turns/CPU-s", rates[1]))

    async def _decoding(self, direct: float) -> tuple[list[float], list[float]]:
        """Returns tokens per CPU-second by number of streams, without and with stop strings."""
        rates: dict[bool, list[float]] = {False: [], True: []}
        async with _serving("detokenizer", self._model, self._core) as worker:
            for streams in self._args.streams:
                for stops in (False, True):
                    say(f"{streams} texts{', with stop strings' if stops else ''}")
                    rate = await self._detokenize(worker, streams, STOPS if stops else ())
                    rates[stops].append(rate)
                    name = f"detokenizing, {_streams(streams)}"
                    if stops:
                        figure = Result(f"{name}, with stop strings", rate, "tokens/CPU-s")
                    else:
                        name += ", against the library's own stream, called directly"
                        figure = compared(name, rate, "tokens/CPU-s", direct)
                    self.results.append(figure)
        return rates[False], rates[True]

    async def _detokenize(
        self, worker: TokensWorker, streams: int, stop_strings: Sequence[str]
    ) -> float:
        """Returns tokens per CPU-second if every step appends a token to each text of a session."""

        async def session(_: int, until: float) -> int:
            return await _TextSession(worker.channel, self._ids, streams, stop_strings).run(until)

        return (await _measured([worker], session, 1, self._args.seconds)).per_core_s


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The work of a worker in a period."""

    amount: int
    """Bytes or tokens."""
    seconds: float
    spent_s: float
    """CPU time of the workers."""

    @property
    def per_core_s(self) -> float:
        return self.amount / self.spent_s


async def _measured(
    workers: Sequence[TokensWorker],
    stream: Callable[[int, float], Coroutine[Any, Any, int]],
    streams: int,
    seconds: float,
) -> WorkDone:
    """stream: works until a given time, and returns the amount of work."""
    loop = asyncio.get_running_loop()
    # Excludes what is created once, on the first input of a kind.
    await asyncio.gather(*(stream(number, loop.time() + seconds / 8) for number in range(streams)))
    spent, began = sum(worker.spent_s() for worker in workers), loop.time()
    done = await asyncio.gather(*(stream(number, began + seconds) for number in range(streams)))
    elapsed = loop.time() - began
    return WorkDone(sum(done), elapsed, sum(worker.spent_s() for worker in workers) - spent)


async def _encode(
    workers: Sequence[TokensWorker],
    requests: Sequence[EncodeRequest],
    *,
    streams: int,
    seconds: float,
) -> WorkDone:
    """Every stream sends one request after another to one worker, until the time is up."""

    async def stream(number: int, until: float) -> int:
        done, turn = 0, number
        while asyncio.get_running_loop().time() < until:
            request = requests[turn % len(requests)]
            turn += streams
            done += await _encoded_bytes(workers[number % len(workers)], request)
        return done

    return await _measured(workers, stream, streams, seconds)


async def _encoded_bytes(worker: TokensWorker, request: EncodeRequest) -> int:
    """Returns the bytes of encoded text. Raises BatonError if an input was refused."""
    stub: Any = TokenizerStub(worker.channel)
    answer = await stub.Encode(request)
    if any(output.HasField("error") for output in answer.outputs):
        raise BatonError("the tokenizer refused a text")
    return sum(len(item.text.encode()) for item in request.inputs)


async def _hard_texts(worker: TokensWorker) -> list[Result]:
    """Encodes a megabyte of each kind of difficult text, with short requests beside it."""
    short = EncodeRequest(inputs=[EncodeInput(text="What is the weather like today?")])
    results, waits = [], []
    for name, unit in HARD.items():
        say(f"a megabyte of {name}")
        text = unit * (LARGEST // len(unit.encode()))
        spent = worker.spent_s()
        hard = asyncio.ensure_future(
            _encoded_bytes(worker, EncodeRequest(inputs=[EncodeInput(text=text)]))
        )
        while not hard.done():
            began = time.perf_counter()
            await _encoded_bytes(worker, short)
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(BESIDE_PAUSE_S)
        await hard
        cost = worker.spent_s() - spent
        results.append(at_most(f"1 MiB of {name}", cost, "CPU-s", HARD_CPU_S))
    slowest = 1000 * max(waits)
    return [*results, at_most("a short request beside them, slowest", slowest, "ms", BESIDE_MS)]


class _TextSession:
    """The router's side of one session with a detokenizer."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        ids: Sequence[int],
        streams: int,
        stop_strings: Sequence[str],
    ) -> None:
        self._call = DetokenizerStub(channel).Session()
        self._tokens = [token_ids_to_bytes([token_id]) for token_id in ids]
        self._stops = stop_strings
        self._done = [0] * streams
        """Tokens of each text that were sent as text or are held back for a stop string."""
        self._total = 0
        self._news = asyncio.Event()

    async def run(self, until: float) -> int:
        """Returns the number of answered tokens. Raises BatonError if a text fails or ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(self._read())
        texts = range(len(self._done))
        opened = detokenizer_pb2.OpenText(skip_special_tokens=True, stop_strings=self._stops)
        try:
            await self._write(
                detokenizer_pb2.DetokenizeOperation(text_id=text, open=opened) for text in texts
            )
            position = 0
            while loop.time() < until:
                await self._write(self._append(text, position) for text in texts)
                position += 1
                while (position - STEPS_AHEAD) * len(texts) > self._total:
                    if reader.done():
                        reader.result()
                    self._news.clear()
                    await self._news.wait()
            return self._total
        finally:
            self._call.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _write(self, operations: Any) -> None:
        await self._call.write(detokenizer_pb2.DetokenizerSessionRequest(operations=operations))

    def _append(self, text: int, position: int) -> detokenizer_pb2.DetokenizeOperation:
        token = self._tokens[(position + 61 * text) % len(self._tokens)]
        append = detokenizer_pb2.AppendTokens(position=position, token_ids=token)
        return detokenizer_pb2.DetokenizeOperation(text_id=text, append=append)

    async def _read(self) -> None:
        try:
            async for response in self._call:
                for delta in response.deltas:
                    if delta.end or delta.HasField("error"):
                        raise BatonError("a text ended that must not")
                    done = max(delta.num_tokens, delta.searched_tokens)
                    self._total += done - self._done[delta.text_id]
                    self._done[delta.text_id] = done
                self._news.set()
        finally:
            self._news.set()


def _text() -> str:
    """Returns about TEXT_BYTES of text."""
    pieces, size = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        piece = path.read_text("utf-8", errors="replace")
        pieces.append(piece)
        size += len(piece)
        if size >= TEXT_BYTES:
            break
    return "".join(pieces)


def batches_of(text: str, size: int) -> list[list[str]]:
    """Returns batches of about `size` characters from at most a megabyte of the text."""
    item = max(min(size, ITEM_BYTES), size // MAX_ITEMS)
    return [
        [text[at : at + item] for at in range(start, start + size, item)]
        for start in range(0, min(len(text) - size, 1 << 20) + 1, size)
    ]


def _request(batch: Sequence[str]) -> EncodeRequest:
    return EncodeRequest(inputs=[EncodeInput(text=text, add_special_tokens=True) for text in batch])


def _mb(rates: Sequence[float]) -> list[float]:
    return [rate / 1e6 for rate in rates]


def _size(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB"


def _streams(count: int) -> str:
    return "one stream" if count == 1 else f"{count} streams"


def run_library(job: dict[str, Any]) -> dict[str, Any]:
    """Uses `tokenizers` in one process and one thread, as without Baton: its fastest call for a
    batch, `encode_batch_fast`, with the ids as a list, and its own `DecodeStream`.

    job: tokenizer, a file; batches, texts by name, each a list of batches; ids, to decode; seconds
    of CPU time for each. Returns encode, bytes per CPU-second by name, and decode, tokens per
    CPU-second.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(job["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(batch: list[str]) -> int:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=True):
            _ = encoding.ids
        return sum(len(text.encode()) for text in batch)

    def decode(ids: list[int]) -> int:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in ids:
            stream.step(tokenizer, token_id)
        return len(ids)

    def rate(work: Callable[[Any], int], items: list[Any]) -> float:
        """Returns the amount of work per CPU-second."""
        done, number, began, warm = 0, 0, time.process_time(), job["seconds"] / 8
        while not done or time.process_time() < began + (warm or job["seconds"]):
            done += work(items[number % len(items)])
            number += 1
            if warm and time.process_time() >= began + warm:
                done, began, warm = 0, time.process_time(), 0.0
        return done / (time.process_time() - began)

    return {
        "encode": {name: rate(encode, batches) for name, batches in job["batches"].items()},
        "decode": rate(decode, [job["ids"]]) if job["ids"] else 0.0,
    }
