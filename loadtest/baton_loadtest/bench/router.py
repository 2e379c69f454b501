"""`baton bench router`: the router's own cost in latency and CPU time.

A real router runs between synthetic workers and clients that only count, so that only the router is
measured. It has its own core if the machine has two; workers and clients, each in its own process,
share another one. The clients use almost no CPU time, so that the router can be driven to its
limits: they split HTTP/2 into frames, count bytes of server-sent events, and never apply
backpressure.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from baton_loadtest.bench.options import option
from baton_loadtest.bench.synthetic import MODEL, WORD, serve_workers
from baton_loadtest.child import answer
from baton_loadtest.drive import HttpLoadClient
from baton_loadtest.launch import BatonProcess, Peer, check_cpu_clock, cores, peer, process, say
from baton_loadtest.report import Report, Result, at_most, ms
from batonlm.cli.access import Access
from batonlm.core.errors import BatonError
from batonlm.rpc.address import split
from batonlm.rpc.server import PUBLIC_STREAMS
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import types_pb2

PLOTS = False
OPTIONS = (
    option("--requests", 300, "whose first token is timed"),
    option("--streams", 5000, "at once, at most"),
    option("--seconds", 10.0, "that streams are measured for"),
    option("--smg", "", "the program of SMG's gateway, to measure beside", metavar="FILE"),
)

FACES = {"grpc": "gRPC", "http": "SSE"}
ADDED_MS, EACH_US, COALESCED_US = 3.0, 80.0, 30.0
SERVE_S = 0.005
PROMPT_WORDS = 512
WARM_REQUESTS = 20
EACH_STREAMS, EACH_STEP_S = 64, 0.025
MANY_STEP_S = 0.25
OPENING_STEP_S = 60.0
"""The step time while streams are opened, so that open ones are almost idle."""

SETTLE_S = 2.0
OPEN_FILES = 16384
AGE_S = 3600
"""The age at which the router closes a connection: longer than a run."""

SHORT_WORDS = 4
ENDLESS = 1 << 14
FIRST_TEXT_S = 120.0
OPENING = 64
"""Streams that wait for their first text at a time; more could time out in a queue."""

WIDE = 2**31 - 1
"""The largest flow-control window."""


@dataclass(frozen=True, slots=True)
class StreamingCost:
    """The cost of a period of streaming."""

    seconds: float
    spent_s: float
    """CPU time of the router."""
    tokens: int
    events: int


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if a stream ends that must not."""
    check_cpu_clock()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    own, other = cores()[0], cores()[-1]
    allowed = args.streams + EACH_STREAMS
    async with peer(serve_workers, other) as workers, peer(serve_clients, other) as clients:
        addresses = await workers.ask(do="open", serve_s=SERVE_S)
        flags = (
            *(f"--{role}s={address}" for role, address in addresses.items()),
            f"--max-requests={allowed}",
            f"--max-connections={allowed}",
            f"--connection-max-age-s={AGE_S}",
            f"--max-connections-per-address={allowed}",
        )
        async with process("router", *flags, core=own) as router:
            bench = _RouterBench(router, workers, clients, args)
            results = [figure for face in FACES for figure in await bench.added(face)]
            for face in FACES:
                results += await bench.each(face)
            for face in FACES:
                results += await bench.many(face)
        if args.smg:
            results += await _beside(args, own, other)
    return results


async def _beside(args: argparse.Namespace, own: int, other: int) -> list[Result]:
    """Returns the figures of SMG's gateway, which has no goals to meet here."""
    # Needs the extra `vllm`.
    from baton_loadtest.bench.gateway import gateway, serve_engine

    async with peer(serve_engine, other) as engine, peer(serve_clients, other) as clients:
        address = (await engine.ask(do="open", serve_s=SERVE_S))["engine"]
        async with gateway(args.smg, address, own) as smg:
            bench = _RouterBench(smg, engine, clients, args, ", SMG")
            found = [*await bench.added("http"), *await bench.each("http")]
    return [Result(figure.name, figure.value, figure.unit) for figure in found]


class _RouterBench:
    """The measurements of running processes."""

    def __init__(
        self,
        router: BatonProcess,
        workers: Peer,
        clients: Peer,
        args: argparse.Namespace,
        suffix: str = "",
    ) -> None:
        """suffix: of the names of figures."""
        self._router, self._workers, self._args, self._suffix = router, workers, args, suffix
        faces = {face: router.announced[face] for face in FACES if face in router.announced}
        self._ask = partial(clients.ask, faces=faces)

    async def added(self, face: str) -> list[Result]:
        """Measures the time to the first text, minus the workers' time."""
        await self._times(face, WARM_REQUESTS)
        times = await self._times(face, self._args.requests)
        name = f"added to the time to first token, {FACES[face]}{self._suffix}"
        return [
            at_most(f"{name}, p50", ms(times, 0.5), "ms", ADDED_MS),
            Result(f"{name}, p99", ms(times, 0.99), "ms"),
        ]

    async def _times(self, face: str, requests: int) -> list[float]:
        total = await self._ask(do="times", face=face, requests=requests, words=PROMPT_WORDS)
        served = (await self._workers.ask(do="times")).values()
        return [
            seconds - sum(times[request] for times in served) for request, seconds in total.items()
        ]

    async def each(self, face: str) -> list[Result]:
        """One event per token."""
        return (await self._streaming(face, EACH_STREAMS, EACH_STEP_S, EACH_US))[:2]

    async def many(self, face: str) -> list[Result]:
        """So many streams that the router must combine tokens unless it keeps up."""
        return await self._streaming(face, self._args.streams, MANY_STEP_S, COALESCED_US)

    async def _streaming(
        self, face: str, streams: int, step_s: float, goal_us: float
    ) -> list[Result]:
        cost = await self._stream(face, streams, step_s)
        name = (
            f"CPU a token, {streams} streams x {1 / step_s:g} tokens/s, {FACES[face]}{self._suffix}"
        )
        return [
            at_most(name, 1e6 * cost.spent_s / cost.tokens, "us", goal_us),
            Result(f"{name}: tokens an event", cost.tokens / cost.events, ""),
            Result(f"{name}: delivered", cost.tokens / cost.seconds, "tokens/s"),
            Result(f"{name}: of the router's core", 100 * cost.spent_s / cost.seconds, "%"),
        ]

    async def _stream(self, face: str, streams: int, step_s: float) -> StreamingCost:
        """Measures a number of streams for a period."""
        say(f"{streams} streams over {FACES[face]}")
        await self._workers.ask(do="step", step_s=OPENING_STEP_S)
        try:
            await self._ask(do="open", face=face, streams=streams)
            await self._workers.ask(do="step", step_s=step_s)
            await asyncio.sleep(SETTLE_S)
            before = await self._ask(do="tally")
            began, spent_s = perf_counter(), self._router.spent_s()
            await asyncio.sleep(self._args.seconds)
            after, spent_s = await self._ask(do="tally"), self._router.spent_s() - spent_s
            seconds = perf_counter() - began
        finally:
            await self._ask(do="close")
        if (await self._workers.ask(do="sessions"))["sessions"] > 1:
            raise BatonError("the router lost its decode worker: this machine is too busy")
        if after["ended"]:
            raise BatonError(f"{after['ended']} of {streams} streams ended")
        await asyncio.sleep(SETTLE_S)
        tokens, events = (after[what] - before[what] for what in ("tokens", "events"))
        return StreamingCost(seconds, spent_s, tokens, events)


@dataclass(slots=True)
class CountedStream:
    """One answer so far."""

    began: float
    first_s: float | None = None
    """Seconds from the request to the first text."""
    events: int = 0
    tokens: int = 0
    ended: bool = False

    def add(self, events: int, words: int) -> None:
        if words and self.first_s is None:
            self.first_s = perf_counter() - self.began
        self.events += events
        self.tokens += words


class GrpcStreams(asyncio.Protocol):
    """Calls of `baton.v1.Inference.Generate` on one HTTP/2 connection."""

    HEADERS = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/baton.v1.Inference/Generate"),
        (":authority", "router"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._numbers = count(1, 2)
        self._encoder = Encoder()
        self._streams: dict[int, CountedStream] = {}
        self._parts: dict[int, bytearray] = {}
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: WIDE}))
        self._send(WindowUpdateFrame(0, WIDE - 65535))

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams.values():
            stream.ended = True
        self._changed()

    def ask(self, prompt: str, max_tokens: int) -> CountedStream:
        stop = types_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True)
        options = pb.GenerationOptions(stop=stop)
        request = pb.GenerateRequest(text=prompt, options=options).SerializeToString()
        number = next(self._numbers)
        stream = self._streams[number] = CountedStream(perf_counter())
        self._parts[number] = bytearray()
        headers = self._encoder.encode(self.HEADERS)
        self._send(HeadersFrame(number, headers, flags=["END_HEADERS"]))
        message = b"\0" + len(request).to_bytes(4, "big") + request
        self._send(DataFrame(number, message, flags=["END_STREAM"]))
        return stream

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        while len(unread) >= 9:
            frame, size = Frame.parse_frame_header(memoryview(bytes(unread[:9])))
            if len(unread) < 9 + size:
                break
            frame.parse_body(memoryview(bytes(unread[9 : 9 + size])))
            del unread[: 9 + size]
            self._take(frame)
        self._changed()

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, DataFrame):
            self._count(frame.stream_id, frame.data)
        elif isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self._send(SettingsFrame(0, flags=["ACK"]))
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            self._send(PingFrame(0, frame.opaque_data, flags=["ACK"]))
        if isinstance(frame, RstStreamFrame) or "END_STREAM" in frame.flags:
            self._streams[frame.stream_id].ended = True

    def _count(self, number: int, data: bytes) -> None:
        part = self._parts[number]
        part += data
        while len(part) >= 5 and len(part) >= (end := 5 + int.from_bytes(part[1:5], "big")):
            event = pb.GenerateResponse.FromString(bytes(part[5:end])).event
            del part[:end]
            if event.WhichOneof("event") == "delta":
                self._streams[number].add(1, len(event.delta.text) // len(WORD))

    def _send(self, frame: Frame) -> None:
        self._transport.write(frame.serialize())


class SseStream:
    """One stream of /v1/completions. `feed` takes its body, split anywhere."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.stream = CountedStream(perf_counter())
        self._changed = changed
        self._unread = bytearray()

    def feed(self, data: bytes) -> None:
        self._unread += data
        if (end := self._unread.rfind(b"\n\n") + 2) > 1:
            events = bytes(self._unread[:end])
            del self._unread[:end]
            self.stream.add(events.count(b"data: "), events.count(WORD.encode()))
        self._changed()

    async def ask(self, client: HttpLoadClient, prompt: str, max_tokens: int) -> None:
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": max_tokens}
        request = client.post("/v1/completions", {**body, "ignore_eos": True, "stream": True})
        try:
            await client.send(request, self.feed)
        finally:
            self.stream.ended = True
            self._changed()


class _Clients:
    """Sends requests, counts and measures times."""

    def __init__(self) -> None:
        self._names = count(1)
        self._closing: list[Callable[[], object]] = []
        self._connection: GrpcStreams | None = None
        self._http: HttpLoadClient | None = None
        self._streams: list[CountedStream] = []
        self._silent: list[CountedStream] = []
        """Streams without any answer so far."""
        self._changed = asyncio.Event()

    async def times(
        self, faces: dict[str, str], face: str, requests: int, words: int
    ) -> dict[str, float]:
        """Returns the seconds to the first text by request name, of sequential requests."""
        times: dict[str, float] = {}
        for name in [next(self._names) for _ in range(requests)]:
            stream = await self._ask(faces, face, "word " * (words - 1) + str(name), 2)
            await self._until(partial(getattr, stream, "ended"))
            if stream.first_s is None:
                raise BatonError(f"nothing came over {face}")
            times[str(name)] = stream.first_s
        self.close()
        return times

    async def open(self, faces: dict[str, str], face: str, streams: int) -> None:
        """Opens so many endless streams. Returns when all have begun."""
        for _ in range(streams):
            await self._until(lambda: self._waiting() < OPENING)
            prompt = "word " * (SHORT_WORDS - 1) + str(next(self._names))
            self._streams.append(await self._ask(faces, face, prompt, ENDLESS))
            self._silent.append(self._streams[-1])
        await self._until(lambda: not self._waiting())

    def tally(self) -> dict[str, int]:
        """Returns the counts of all open streams so far."""
        return {
            what: sum(getattr(stream, what) for stream in self._streams)
            for what in ("events", "tokens", "ended")
        }

    def close(self) -> None:
        for close in self._closing:
            close()
        self._closing.clear()
        self._streams.clear()
        self._connection = None

    def _waiting(self) -> int:
        self._silent = [stream for stream in self._silent if stream.first_s is None]
        return len(self._silent)

    async def _ask(
        self, faces: dict[str, str], face: str, prompt: str, max_tokens: int
    ) -> CountedStream:
        if face == "http":
            one = SseStream(self._changed.set)
            self._http = self._http or HttpLoadClient(Access(faces[face]))
            task = asyncio.create_task(one.ask(self._http, prompt, max_tokens))
            self._closing.append(task.cancel)
            return one.stream
        if self._connection is None or len(self._streams) % PUBLIC_STREAMS == 0:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                lambda: GrpcStreams(self._changed.set), *split(faces[face], face)
            )
            self._closing.append(self._connection.close)
        return self._connection.ask(prompt, max_tokens)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Raises TimeoutError if the condition does not become true."""
        async with asyncio.timeout(FIRST_TEXT_S):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


async def serve_clients() -> None:
    """Each command has faces: the router's addresses ("grpc" and "http", as host:port)."""
    clients = _Clients()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        what, faces = command.pop("do"), command.pop("faces")
        match what:
            case "times":
                return await clients.times(faces, **command)
            case "open":
                await clients.open(faces, **command)
                return {}
            case "tally":
                return clients.tally()
            case _:
                clients.close()
                return {}

    await answer(handle)
