"""Streams whose answers are known, run while processes die, and the comparison of their answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, compared
from batonlm.rpc.channels import open_channel
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.peers import api_key_metadata
from batonlm.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SHORTEST, LONGEST = 128, 256
"""Output tokens of a stream. Stop strings take effect after the shortest."""

PROMPT_WORDS = (20, 90)
PROMPT_TOKENS = (60, 300)
TOKEN_IDS = (64, 1900)
"""Ordinary tokens of the bundled model."""

STOP_STRINGS = ("and", "ing", "ed", "ou", "ea", "th", "al", "is")
"""Two of them occur in nearly every text between the shortest and the longest."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Kind(Enum):
    """The kind of a stream; the value is its name in tables."""

    GREEDY = "greedy"
    SAMPLED = "sampled, with penalties"
    STOPPED = "with stop strings"
    LOGPROBS = "with log-probabilities"
    CHOICES = "with n = 2"


KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One stream: its request and the number of its choices."""

    number: int
    kind: Kind
    request: inference_pb2.GenerateRequest


def streams(seed: int, count: int) -> list[Wanted]:
    """Returns streams, equally many of each kind, half with texts and half with token ids. They
    depend only on the seed."""
    draw = random.Random(f"streams {seed}")
    return [_stream(draw, number) for number in range(count)]


def short(draw: random.Random) -> Wanted:
    """Returns a stream of two tokens with a prompt that is not cached."""
    ids = [draw.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS[0])]
    options = inference_pb2.GenerationOptions(
        stop=types_pb2.StopParams(max_tokens=2, ignore_eos=True)
    )
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids), options=options
    )
    return Wanted(-1, Kind.GREEDY, request)


def _stream(draw: random.Random, number: int) -> Wanted:
    kind = KINDS[number % len(KINDS)]
    request = inference_pb2.GenerateRequest(
        options=inference_pb2.GenerationOptions(
            sampling=types_pb2.SamplingParams(temperature=0.0, seed=draw.getrandbits(53)),
            stop=types_pb2.StopParams(max_tokens=draw.randint(SHORTEST, LONGEST), ignore_eos=True),
            return_token_ids=True,
        )
    )
    if draw.random() < 0.5:
        request.text = " ".join(_word(draw) for _ in range(draw.randint(*PROMPT_WORDS)))
    else:
        length = draw.randint(*PROMPT_TOKENS)
        request.token_ids.ids.extend(draw.randrange(*TOKEN_IDS) for _ in range(length))
    _OF_KIND[kind](request.options, draw)
    return Wanted(number, kind, request)


def _word(draw: random.Random) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 8)))


def _greedy(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    pass


def _sampled(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = draw.choice((0.7, 1.0, 1.3))
    options.sampling.top_p = 0.95
    options.sampling.repetition_penalty = 1.1
    options.sampling.frequency_penalty = 0.1


def _stopped(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = draw.choice((0.0, 1.0))
    options.stop.min_tokens = SHORTEST
    options.stop.max_tokens = LONGEST
    options.stop.stop_strings.extend(draw.sample(STOP_STRINGS, 2))
    options.stop.include_stop_string = draw.random() < 0.5


def _logprobs(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = draw.choice((0.0, 1.0))
    options.sampling.top_logprobs = 3


def _choices(options: inference_pb2.GenerationOptions, draw: random.Random) -> None:
    options.sampling.temperature = 1.0
    options.n = 2


_OF_KIND: dict[Kind, Callable[[inference_pb2.GenerationOptions, random.Random], None]] = {
    Kind.GREEDY: _greedy,
    Kind.SAMPLED: _sampled,
    Kind.STOPPED: _stopped,
    Kind.LOGPROBS: _logprobs,
    Kind.CHOICES: _choices,
}


PARTS = ("tokens", "text", "log-probabilities", "ends")
"""The compared parts: token ids; text by its bytes; log-probabilities with their tokens' bytes; and
finish reasons, stop strings and usage."""


@dataclass(slots=True)
class Answer:
    """The answer to one stream, by choice."""

    times: list[float]
    """When the request was sent and when each event arrived, in seconds of one clock."""
    request_id: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Finish reason and stop string."""
    usage: tuple[int, int] | None = None
    """Prompt and output tokens."""
    failed: grpc.StatusCode | None = None
    """The status code that ended the stream early."""
    words: str = ""
    """gRPC's message for it."""
    losses: list[float] = field(default_factory=list)
    """When the client lost the stream and went on with it."""
    later_ids: list[str] = field(default_factory=list)
    """Ids of the requests with which it went on."""
    event_id: str = ""
    """Of the last delta, where events have ids."""

    def take(self, event: inference_pb2.GenerationEvent, now: float) -> None:
        self.times.append(now)
        match event.WhichOneof("event"):
            case "accepted":
                self.request_id = event.accepted.request_id
            case "finished":
                self.usage = (event.finished.prompt_tokens, event.finished.completion_tokens)
            case "delta":
                self.event_id = event.id
                self._take_delta(event.delta)

    def _take_delta(self, delta: inference_pb2.ChoiceDelta) -> None:
        choice = delta.choice
        self.tokens.setdefault(choice, []).extend(delta.token_ids)
        self.text[choice] = self.text.get(choice, "") + delta.text
        self.logprobs.setdefault(choice, []).extend(
            entry.SerializeToString(deterministic=True) for entry in delta.logprobs
        )
        if delta.finish_reason:
            self.ends[choice] = (delta.finish_reason, delta.stop_string)

    @property
    def finished(self) -> bool:
        return self.usage is not None and self.failed is None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def silence(self, since: float) -> float:
        """Returns the longest time without an event, among those that ended after `since`."""
        began, ended = self.longest_silence(since)
        return ended - began

    def longest_silence(self, since: float) -> tuple[float, float]:
        """Returns when it began and ended."""
        gaps = [pair for pair in pairwise(self.times) if pair[1] > since]
        return max(gaps, default=(since, since), key=lambda pair: pair[1] - pair[0])

    def gaps(self) -> list[float]:
        """Returns the times between events with tokens; the first event, the acceptance, has
        none."""
        return [later - earlier for earlier, later in pairwise(self.times[2:])]


def differences(got: Answer, expected: Answer) -> set[str]:
    """Returns the parts in which a stream differs from its reference."""
    found = {
        "tokens": got.tokens == expected.tokens,
        "text": _bytes(got.text) == _bytes(expected.text),
        "log-probabilities": got.logprobs == expected.logprobs,
        "ends": (got.ends, got.usage) == (expected.ends, expected.usage),
    }
    return {part for part in PARTS if not found[part]}


def is_shifted(got: Sequence[int], expected: Sequence[int]) -> bool:
    """Returns whether tokens differ only by a run that is missing or repeated."""
    short, long = sorted((got, expected), key=len)
    if len(short) == len(long):
        return False
    same = next(
        (i for i, pair in enumerate(zip(short, long, strict=False)) if len(set(pair)) > 1),
        len(short),
    )
    left = len(short) - same
    return list(short[same:]) == list(long[len(long) - left :])


def _bytes(text: dict[int, str]) -> dict[int, bytes]:
    return {choice: part.encode() for choice, part in text.items()}


TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""gRPC uses IPv4 through IPv6 sockets."""


def caller(local_port: int, remote_port: int, processes: Mapping[int, str]) -> str:
    """Returns which of these processes (names by id) connected from one port to another on
    loopback; "" if none.

    The kernel's tables (Linux) have the socket of a port, and a process's open files its sockets;
    no privileges are needed for one's own processes.
    """
    inode = _inode(local_port, remote_port)
    for pid, name in processes.items():
        if inode and f"socket:[{inode}]" in _open_files(pid):
            return name
    return ""


def _inode(local_port: int, remote_port: int) -> str:
    """Returns the inode of a connected socket. The kernel's table has hexadecimal addresses."""
    ends = (f":{local_port:04X}", f":{remote_port:04X}")
    for table in TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if columns[1].endswith(ends[0]) and columns[2].endswith(ends[1]):
                return columns[9]
    return ""


def _open_files(pid: int) -> set[str]:
    """Returns the targets of a process's open files; empty if it has ended."""
    found = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            # It may be closed by now.
            with suppress(OSError):
                found.add(os.readlink(file))
    return found


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
"""A gRPC client of several routers, configured as recommended: it uses routers that report healthy,
and retries once if it was refused before the first event. A stream that has begun is not retried.
"""

Stub: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"


@asynccontextmanager
async def client_of(routers: Sequence[str], key: str = "") -> AsyncIterator[Stub]:
    """Opens one client of all these addresses (host:port). key: its API key, or ""."""
    options = (
        ("grpc.service_config", json.dumps(CLIENT)),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )
    target = f"ipv4:{','.join(routers)}"
    async with open_channel(target, plain=options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        stub.Generate = partial(stub.Generate, metadata=api_key_metadata(key))
        yield stub


async def follow(stub: Stub, wanted: Wanted, answer: Answer) -> None:
    """Reads a stream to its end, successful or not, into an answer."""
    try:
        async for response in stub.Generate(wanted.request, timeout=TIMEOUT_S):
            answer.take(response.event, time.monotonic())
    except grpc.aio.AioRpcError as error:
        answer.failed, answer.words = error.code(), error.details() or ""


RESUME_PAUSE_S = 0.1
"""The pause between two calls that brought nothing."""


async def follow_on(stub: Stub, wanted: Wanted, answer: Answer) -> None:
    """Like `follow`, but goes on with the stream, at any router, after a failure that allows it."""
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(wanted.request)
    request.options.event_ids = True
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        again, left_s = bool(request.options.last_event_id), deadline - time.monotonic()
        nothing_yet = True
        try:
            async for response in stub.Generate(request, timeout=left_s):
                event, nothing_yet = response.event, False
                request.options.last_event_id = event.id
                # The acceptance of another run is no event that the client waits for.
                if again and event.HasField("accepted"):
                    answer.later_ids.append(event.accepted.request_id)
                else:
                    answer.take(event, time.monotonic())
            return
        except grpc.aio.AioRpcError as error:
            now = time.monotonic()
            if not from_rpc_error(error).retryable or now >= deadline:
                answer.failed, answer.words = error.code(), error.details() or ""
                return
            answer.losses.append(now)
        await asyncio.sleep(RESUME_PAUSE_S if nothing_yet else 0.0)


class Load:
    """Runs a list of streams once, or repeatedly.

    answers: in the order in which they end. open: running streams, by the number of their request.
    """

    def __init__(
        self,
        stub: Stub,
        streams: Sequence[Wanted],
        concurrency: int,
        follow: Callable[[Stub, Wanted, Answer], Awaitable[None]] = follow,
    ) -> None:
        self.answers: list[tuple[Wanted, Answer]] = []
        self.open: dict[int, Answer] = {}
        self._stub, self._streams, self._concurrency = stub, streams, concurrency
        self._follow = follow
        self._enough = False

    async def once(self) -> list[Answer]:
        """Runs every stream once. Returns the answers in the order of the streams."""
        await self._run(iter(self._streams))
        by_number = {wanted.number: answer for wanted, answer in self.answers}
        return [by_number[wanted.number] for wanted in self._streams]

    @asynccontextmanager
    async def on_and_on(self) -> AsyncIterator[None]:
        """Runs streams within the block; at its end, waits for those that run."""
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
        """Returns when as many streams as run at a time have tokens or have ended."""
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
            await self._follow(self._stub, wanted, answer)
        finally:
            del self.open[number]
        self.answers.append((wanted, answer))


def compared_with(
    wanted: Sequence[Wanted], reference: Sequence[Answer], answers: Sequence[Answer]
) -> list[Result]:
    """Compares answers with references by index. Differences are printed at once."""
    differing: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    shifted = 0
    for one, expected, got in zip(wanted, reference, answers, strict=True):
        found = differences(got, expected)
        differing.update(found)
        equal[one.kind.value] += not found
        shifted += _is_shifted(got, expected)
        if found or not (got.finished and expected.finished):
            _tell(one, expected, got, found)
    count, kinds = len(answers), Counter(one.kind.value for one in wanted)
    return [
        Result("streams", count, ""),
        Result("tokens of these", sum(answer.num_tokens for answer in answers), ""),
        compared("finished", sum(a.finished for a in answers), "", count, 1.0),
        *(compared(f"equal {part}", count - differing[part], "", count, 1.0) for part in PARTS),
        at_most("streams with tokens left out or told twice", shifted, "", 0),
        *(
            compared(f"equal in everything: {kind.value}", equal[kind.value], "", number, 1.0)
            for kind in KINDS
            if (number := kinds[kind.value])
        ),
    ]


def left_behind(held: float, unasked: int) -> list[Result]:
    """Returns what remains in the processes after all streams have ended."""
    return [
        at_most("held on workers when all streams had ended", held, "", 0),
        at_most("processes that ended by themselves", unasked, "", 0),
    ]


def _is_shifted(got: Answer, expected: Answer) -> bool:
    return any(
        is_shifted(got.tokens.get(choice, []), ids)
        for choice, ids in expected.tokens.items()
        if got.finished
    )


def _tell(wanted: Wanted, expected: Answer, got: Answer, found: set[str]) -> None:
    parts = ", ".join(sorted(found)) or "nothing"
    failed = f"; failed with {got.failed.name}: {got.words}" if got.failed else ""
    missing = "" if expected.finished else "; its reference did not finish"
    say(
        f"stream {wanted.number} ({wanted.kind.value}, {got.request_id}) differs in {parts}"
        f"{failed}{missing}"
    )
