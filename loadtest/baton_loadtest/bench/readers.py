"""`baton bench readers`: what readers that stall and senders that crawl cost everybody else.

The same streams are followed alone and beside a crowd, in turns. A step takes a fixed time, so that
nothing but the router's own work can stretch the time between two tokens. The crowd's own answers
are made before its turn is measured: only that they are not read is measured. The crowd is a
process of its own:

    read nothing    half over HTTP (SSE), half over gRPC; each asks for far more than buffers hold
    send slowly     two fifths a request's head, as many a request's body, a byte a second each; the
                    others send the preface of HTTP/2 to the gRPC port, half of them only a part of
                    it, and then nothing. One that is cut comes back at once
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from baton.cli.access import Access
from baton.cli.layout import UpOptions
from baton.rpc.address import split
from baton.rpc.channels import PUBLIC_CLIENT, open_channel
from baton.v1 import inference_pb2_grpc
from baton_loadtest.bench.options import option
from baton_loadtest.child import answer
from baton_loadtest.drive import (
    HttpLoadClient,
    answers,
    greedy,
    random_prompts,
)
from baton_loadtest.launch import RunningBaton, environment, fleet, peer, say
from baton_loadtest.report import Report, Result, at_most, compared, ms

PLOTS = False
OPTIONS = (
    option("--stalled", 200, "readers"),
    option("--slow", 500, "senders"),
    option("--streams", 16, "neighbours"),
    option("--output-tokens", 400, "of each"),
    option("--step-ms", 20.0, metavar="MS"),
    option("--limit-s", 30.0, "the router's limit for a reader without progress"),
    option("--rounds", 5, "pairs, in turns"),
)

GOAL = 1.2
WAIT_S = 120.0
SETTLE_S = 1.0
MIB = 1 << 20

PROMPT = list(range(100, 108))
HTTP_TOKENS, GRPC_TOKENS = 320, 160
"""With the most log-probabilities: several times what the sockets in between hold."""

TOP_LOGPROBS = 20
READER_BYTES = 4096
BYTE_S = 1.0
RETRY_S = 0.5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class ReadersTurn:
    """What the neighbours' streams were like in one turn, and what memory was held then."""

    gaps: list[float]
    """Between tokens, in seconds."""
    rss: float
    """The router's own memory, in bytes."""
    sockets: float
    """The kernel's memory of all sockets, in bytes."""

    @property
    def p99(self) -> float:
        return ms(self.gaps, 0.99)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when a stream fails."""
    with environment(
        BATON_FAKE_STEP_MS=args.step_ms,
        BATON_STALL_TIMEOUT_S=args.limit_s,
        BATON_MAX_RUNNING=1024,
        BATON_MAX_WAITING=4096,
    ):
        return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    alone, beside = [], []
    cut: dict[str, Any] = {}
    async with fleet(UpOptions(runner="fake", prefill=0, transport="loopback")) as running:
        await _turn(running, args)
        for number in range(args.rounds):
            alone.append(await _turn(running, args))
            async with peer(crowd) as people:
                await people.ask(
                    http=running.routers[0],
                    grpc=running.layout.grpc,
                    stalled=args.stalled,
                    slow=args.slow,
                )
                await _answers_made(running)
                beside.append(await _turn(running, args))
                if number == args.rounds - 1:
                    say(f"waiting {args.limit_s:.0f} s and a little for the crowd to be cut")
                    await asyncio.sleep(args.limit_s * 1.25 + 5.0)
                    cut = await people.ask()
            say(
                f"round {number + 1} of {args.rounds}: p99 {alone[-1].p99:.1f} ms alone, "
                f"{beside[-1].p99:.1f} ms beside the crowd"
            )
    return _figures(args, alone, beside, cut)


def _figures(
    args: argparse.Namespace,
    alone: list[ReadersTurn],
    beside: list[ReadersTurn],
    cut: dict[str, Any],
) -> list[Result]:
    def both(name: str, unit: str, of: Callable[[ReadersTurn], float]) -> Result:
        return compared(name, median(map(of, beside)), unit, median(map(of, alone)))

    before, after = (median(turn.p99 for turn in turns) for turns in (alone, beside))
    of_http, of_grpc = args.stalled - args.stalled // 2, args.stalled // 2
    cut_s = cut["http_cut_s"]
    return [
        Result("readers that stall", args.stalled, ""),
        Result("senders that crawl", args.slow, ""),
        Result("neighbours", args.streams, "streams"),
        Result("a step of their worker", args.step_ms, "ms"),
        both("between tokens, p50, median turn", "ms", lambda turn: ms(turn.gaps, 0.5)),
        at_most("between tokens, p99, median turn", after, "ms", GOAL, before),
        both("router's memory, median turn", "MiB", lambda turn: turn.rss / MIB),
        both(
            "all sockets' memory in the kernel, median turn", "MiB", lambda turn: turn.sockets / MIB
        ),
        Result("limit without progress", args.limit_s, "s"),
        Result("stalled over HTTP that were cut", 100 * len(cut_s) / of_http, "%"),
        Result("cut over HTTP after, longest", max(cut_s, default=0.0), "s"),
        Result("stalled over gRPC that were cut", 100 * cut["grpc_cut"] / of_grpc, "%"),
    ]


async def _turn(running: RunningBaton, args: argparse.Namespace) -> ReadersTurn:
    prompts = random_prompts(args.seed, args.streams, 16)
    samples = await answers(running.layout.grpc, prompts, args.output_tokens, args.streams)
    gaps = [gap for sample in samples for gap in sample.gaps_s if gap]
    metrics = await running.metrics()
    return ReadersTurn(gaps, metrics["process_resident_memory_bytes"], _socket_bytes())


async def _answers_made(running: RunningBaton) -> None:
    """Returns when the crowd's answers are made, as far as the worker makes them."""
    async with asyncio.timeout(WAIT_S):
        while True:
            metrics = await running.metrics("decode-0")
            if not any(n for name, n in metrics.items() if name.startswith("baton_sequences{")):
                break
            await asyncio.sleep(0.25)
    await asyncio.sleep(SETTLE_S)


def _socket_bytes() -> float:
    """What the kernel holds in TCP buffers of this machine, where it says so."""
    with suppress(OSError):
        for line in Path("/proc/net/sockstat").read_text().splitlines():
            if line.startswith("TCP:"):
                return float(max(1, int(line.split()[-1])) * os.sysconf("SC_PAGE_SIZE"))
    return math.nan


# The crowd.


async def crowd() -> None:
    """The first command is http, grpc (host:port), stalled and slow (how many of each), and is
    answered when all are there; the second is answered with who was cut since."""
    http, calls = _StalledHttp(), _StalledCalls()
    tasks: list[asyncio.Task[None]] = []

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        if not command:
            return {"http_cut_s": http.cut_s, "grpc_cut": await calls.num_cut()}
        half = command["stalled"] // 2
        await asyncio.gather(
            *(http.add(command["http"]) for _ in range(command["stalled"] - half)),
            *(calls.add(command["grpc"]) for _ in range(half)),
        )
        tasks.append(asyncio.create_task(http.watch()))
        # After those, which are to be let in: slow senders take their tenant's share of bodies.
        for number in range(command["slow"]):
            way = _slow_way(number, command["http"], command["grpc"])
            tasks.append(asyncio.create_task(_send_slowly(*way)))
        return {}

    try:
        await answer(handle)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _StalledHttp:
    """Connections over HTTP whose answers are not read, and when the server ended each."""

    def __init__(self) -> None:
        self._sockets: dict[int, tuple[socket.socket, float]] = {}
        self._poll = select.poll()
        self.cut_s: list[float] = []

    async def add(self, address: str) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READER_BYTES)
        client.setblocking(False)
        fields = {"logprobs": TOP_LOGPROBS}
        request = HttpLoadClient(Access(address), "", fields).prepare(PROMPT, HTTP_TOKENS)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, split(address, "http"))
        accepted = b"HTTP/1.1 200"
        # The crowd is one tenant, and some of it are refused while others are let in.
        while True:
            await loop.sock_sendall(client, request)
            if await loop.sock_recv(client, len(accepted)) == accepted:
                break
            await loop.sock_recv(client, READER_BYTES)
            await asyncio.sleep(RETRY_S)
        self._sockets[client.fileno()] = client, time.monotonic()
        self._poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)

    async def watch(self) -> None:
        """Notes who is cut. Reads nothing."""
        while True:
            for number, _ in self._poll.poll(0):
                client, since = self._sockets.pop(number)
                self._poll.unregister(number)
                client.close()
                self.cut_s.append(time.monotonic() - since)
            await asyncio.sleep(0.1)


class _StalledCalls:
    """The same over gRPC. Only reading shows that a call has ended, so that is done at the end."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._channels: list[grpc.aio.Channel] = []

    async def add(self, address: str) -> None:
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", READER_BYTES))
        self._channels.append(open_channel(address, plain=(*PUBLIC_CLIENT, *window)))
        request = greedy(PROMPT, GRPC_TOKENS)
        request.options.sampling.top_logprobs = TOP_LOGPROBS
        call = inference_pb2_grpc.InferenceStub(self._channels[-1]).Generate(request)
        self._calls.append(call)
        await call.read()

    async def num_cut(self) -> int:
        """How many were ended by the server before their answers ended."""
        cut = 0
        for call in self._calls:
            try:
                async with asyncio.timeout(10):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            except grpc.aio.AioRpcError as error:
                cut += error.code() is grpc.StatusCode.CANCELLED
            except TimeoutError:
                pass
        return cut


async def _send_slowly(address: str, start: bytes, drip: bytes) -> None:
    """Sends the start, then one byte a second; comes back when it is cut, for ever."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(*split(address, "http"))
            try:
                writer.write(start)
                for byte in cycle(drip) if drip else ():
                    await asyncio.sleep(BYTE_S)
                    if reader.at_eof() or writer.is_closing():
                        break
                    writer.write(bytes([byte]))
                if not drip:
                    await reader.read()
            finally:
                writer.close()
        await asyncio.sleep(0.1)


def _slow_way(number: int, http: str, rpc: str) -> tuple[str, bytes, bytes]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    match number % 10:
        case 0 | 1 | 2 | 3:
            return http, head + b"x-slow: ", b"a"
        case 4 | 5 | 6 | 7:
            return http, head + b"content-length: 100000\r\n\r\n", b" "
        case 8:
            return rpc, PREFACE[:12], b""
        case _:
            return rpc, PREFACE, b""
