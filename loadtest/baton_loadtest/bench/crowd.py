"""Clients that a server should not notice: some that read nothing, some that send too slowly.

A process of its own, so that what it costs is not the measuring client's. Says `{"ready": ...}`
when all are there, and at the end of its input what became of those that read nothing.

    read nothing    half over HTTP (SSE), half over gRPC; each asks for far more than buffers hold
    send slowly     two fifths a request's head, as many a request's body, a byte a second each;
                    the others greet a gRPC port, half of them not even to the end, and then ask
                    nothing. Whoever is cut comes back at once
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, cycle

import grpc

from baton.rpc.options import PUBLIC_CLIENT
from baton.rpc.transport import open_channel
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, types_pb2

PROMPT = list(range(100, 108))
HTTP_TOKENS, GRPC_TOKENS = 320, 160
"""With the most log-probabilities: several times what the sockets in between hold."""

TOP_LOGPROBS = 20
READER_BYTES = 4096
BYTE_S = 1.0
RETRY_S = 0.5
ACCEPTED = b"HTTP/1.1 200"
GRPC_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Stalled:
    """Connections over HTTP whose answers nobody reads, and when the server ended each."""

    def __init__(self) -> None:
        self._sockets: dict[int, tuple[socket.socket, float]] = {}
        self._poll = select.poll()
        self.cut_s: list[float] = []

    async def add(self, host: str, port: int) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READER_BYTES)
        client.setblocking(False)
        body = json.dumps(
            {
                "prompt": PROMPT,
                "max_tokens": HTTP_TOKENS,
                "logprobs": TOP_LOGPROBS,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, port))
        # The crowd is one tenant, and some of it are refused while the others are let in.
        while True:
            await loop.sock_sendall(client, f"{head}{body}".encode())
            status = await loop.sock_recv(client, len(ACCEPTED))
            if status == ACCEPTED:
                break
            await loop.sock_recv(client, READER_BYTES)
            await asyncio.sleep(RETRY_S)
        self._sockets[client.fileno()] = client, time.monotonic()
        self._poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)

    def look(self) -> None:
        """Notes who was cut since the last look. Reads nothing."""
        for number, _ in self._poll.poll(0):
            client, since = self._sockets.pop(number)
            self._poll.unregister(number)
            client.close()
            self.cut_s.append(time.monotonic() - since)


class StalledCalls:
    """The same over gRPC. Only reading shows that a call has ended, so that is done at the end."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]] = []

    async def add(self) -> None:
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", READER_BYTES))
        channel = open_channel(self._target, plain=(*PUBLIC_CLIENT, *window))
        self._channels.append(channel)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=PROMPT),
                options=pb.GenerationOptions(
                    sampling=types_pb2.SamplingParams(top_logprobs=TOP_LOGPROBS),
                    stop=types_pb2.StopParams(max_tokens=GRPC_TOKENS, ignore_eos=True),
                ),
            )
        )
        self._calls.append(call)
        await call.read()

    async def num_cut(self) -> int:
        """How many were ended by the server, and not with their answers."""
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


async def slow(host: str, port: int, start: bytes, drip: bytes) -> None:
    """Sends the start, then one byte a second; comes back when it is cut. For ever."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
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


def slow_ways(
    http: tuple[str, int], grpc_: tuple[str, int]
) -> Iterator[tuple[str, int, bytes, bytes]]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    for number in count():
        match number % 10:
            case 0 | 1 | 2 | 3:
                yield *http, head + b"x-slow: ", b"a"
            case 4 | 5 | 6 | 7:
                yield *http, head + b"content-length: 100000\r\n\r\n", b" "
            case 8:
                yield *grpc_, GRPC_GREETING[:12], b""
            case _:
                yield *grpc_, GRPC_GREETING, b""


async def main(args: argparse.Namespace) -> None:
    http, rpc = _address(args.http), _address(args.grpc)
    stalled, calls = Stalled(), StalledCalls(args.grpc)
    ways = slow_ways(http, rpc)
    dripping: list[asyncio.Task[None]] = []
    try:
        half = args.stalled // 2
        await asyncio.gather(
            *(stalled.add(*http) for _ in range(args.stalled - half)),
            *(calls.add() for _ in range(half)),
        )
        # After those, which are to be let in: what crawls takes its tenant's share of bodies.
        dripping += [asyncio.create_task(slow(*next(ways))) for _ in range(args.slow)]
        print(json.dumps({"ready": args.stalled + args.slow}), flush=True)
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not ended.done():
            stalled.look()
            await asyncio.wait({ended}, timeout=0.1)
        stalled.look()
        told = {"http_cut_s": stalled.cut_s, "grpc_cut": await calls.num_cut() if args.count else 0}
        print(json.dumps(told), flush=True)
    finally:
        for task in dripping:
            task.cancel()
        await asyncio.gather(*dripping, return_exceptions=True)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--stalled", type=int, required=True)
    parser.add_argument("--slow", type=int, required=True)
    parser.add_argument("--count", action="store_true", help="read at the end who was cut")
    asyncio.run(main(parser.parse_args()))
