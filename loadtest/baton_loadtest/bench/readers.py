"""`baton bench readers`: the effect of stalled readers and slow senders on other clients.

The same streams run alone and beside a crowd, in turns. A step takes a fixed time, so that only the
router's own work can increase the time between two tokens. The crowd's answers are generated before
its turn is measured, so that only their not being read is measured. The crowd is a process of its
own:

    read nothing    half over HTTP (SSE), half over gRPC; each requests far more than buffers hold
    send slowly     two fifths send a request's head, and two fifths a body, at a byte a second; the
                    others send the preface of HTTP/2 to the gRPC port, half of them a part of it,
                    and then nothing. One that is disconnected reconnects at once
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
from batonlm.cli.access import Access
from batonlm.cli.layout import UpOptions
from batonlm.rpc.address import split
from batonlm.rpc.channels import PUBLIC_CLIENT, open_channel
from batonlm.v1 import inference_pb2_grpc

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
"""With the most log-probabilities: several times what the sockets in between can buffer."""

TOP_LOGPROBS = 20
READER_BYTES = 4096
BYTE_S = 1.0
RETRY_S = 0.5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class ReadersTurn:
    """The other clients' streams in one turn, and the memory used then."""

    gaps: list[float]
    """Seconds between tokens."""
    rss: float
    """The router's memory in bytes."""
    sockets: float
    """The kernel's memory of all sockets, in bytes."""

    @property
    def p99(self) -> float:
        return ms(self.gaps, 0.99)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if a stream fails."""
    with environment(
        BATON_FAKE_STEP_MS=args.step_ms,
        BATON_STALL_TIMEOUT_S=args.limit_s,
        BATON_MAX_RUNNING=1024,
        BATON_TEST_CONSTANTS="batonlm.worker.options.MAX_WAITING=4096",
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
    """Returns when the crowd's answers are generated, as far as the worker generates them."""
    async with asyncio.timeout(WAIT_S):
        while True:
            metrics = await running.metrics("decode-0")
            if not any(n for name, n in metrics.items() if name.startswith("baton_sequences{")):
                break
            await asyncio.sleep(0.25)
    await asyncio.sleep(SETTLE_S)


def _socket_bytes() -> float:
    """Returns the bytes in the kernel's TCP buffers on this machine, if it reports them."""
    with suppress(OSError):
        for line in Path("/proc/net/sockstat").read_text().splitlines():
            if line.startswith("TCP:"):
                return float(max(1, int(line.split()[-1])) * os.sysconf("SC_PAGE_SIZE"))
    return math.nan


async def crowd() -> None:
    """The first command has http, grpc (host:port), stalled and slow (the number of each), and is
    answered when all are connected; the second is answered with the number disconnected since."""
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
        # Slow senders use up their tenant's limit of bodies, so they connect after the others.
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
    """HTTP connections whose answers are not read, and when the server closed each."""

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
        # The crowd is one tenant, so some requests are refused while others are admitted.
        while True:
            await loop.sock_sendall(client, request)
            if await loop.sock_recv(client, len(accepted)) == accepted:
                break
            await loop.sock_recv(client, READER_BYTES)
            await asyncio.sleep(RETRY_S)
        self._sockets[client.fileno()] = client, time.monotonic()
        self._poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)

    async def watch(self) -> None:
        """Records which connections are closed, without reading."""
        while True:
            for number, _ in self._poll.poll(0):
                client, since = self._sockets.pop(number)
                self._poll.unregister(number)
                client.close()
                self.cut_s.append(time.monotonic() - since)
            await asyncio.sleep(0.1)


class _StalledCalls:
    """Calls over gRPC that are not read. Their end can only be seen by reading, done at the end."""

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
        """Returns how many calls the server ended before their answers ended."""
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
    """Sends the start, then one byte a second; reconnects when disconnected, endlessly."""
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
