"""The network between the processes of a run: a proxy in front of every worker.

Routers get the proxies' addresses instead of the workers', and a worker announces its proxy's
address as its own, as behind any other network; so the processes run unchanged. Shared memory,
through which KV moves on one machine, bypasses the proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from baton_loadtest.chaos.streams.load import caller
from batonlm.cli.layout import Layout, ProcessSpec
from batonlm.cli.ports import HOST, free_ports
from batonlm.rpc.address import split

CHUNK = 64 * 1024
MAX_ON_THE_WAY = 64
"""Chunks of one direction of a connection; beyond that its sender has to wait."""


class Way:
    """One direction of an edge.

    Data is not lost or refused while the direction is cut: it waits, connections stay open, and the
    end of a connection is not forwarded, as if a network dropped all packets. Data that TCP would
    retransmit flows when the edge is restored.

    delay_s: of every byte. bytes_per_s: of a connection; 0: unlimited. num_bytes: forwarded bytes.
    num_fresh: those that were sent since the last `heal`.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.num_bytes = self.num_fresh = 0
        self._healed_at = 0.0
        self._open = asyncio.Event()
        self._open.set()

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._healed_at, self.num_fresh = asyncio.get_running_loop().time(), 0
        self._open.set()

    def count(self, num_bytes: int, said_at: float) -> None:
        self.num_bytes += num_bytes
        self.num_fresh += num_bytes if said_at > self._healed_at else 0

    async def passable(self) -> None:
        await self._open.wait()


@dataclass(frozen=True, slots=True)
class Edge:
    """All connections of a caller to a callee."""

    there: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)


class Proxy:
    """A TCP proxy in front of one process, which can cut, delay and throttle each caller's data.

    edge_of: the edge of the process that connected from a local port. None: the connection is
    rejected, for example because the caller has already closed it.
    """

    def __init__(self, listen: str, target: str, edge_of: Callable[[int], Edge | None]) -> None:
        self._listen, self._target = split(listen, "listen"), split(target, "target")
        self._edge_of = edge_of
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, *self._listen)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            # A caller or callee that has ended only ends the connection.
            with suppress(OSError, asyncio.CancelledError):
                await self._carry(reader, writer)
        finally:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        edge = self._edge_of(writer.get_extra_info("peername")[1])
        if edge is None:
            return
        await edge.there.passable()
        to_reader, to_writer = await asyncio.open_connection(*self._target)
        try:
            there = asyncio.create_task(_pass_on(reader, to_writer, edge.there))
            back = asyncio.create_task(_pass_on(to_reader, writer, edge.back))
            try:
                await asyncio.wait((there, back), return_when=asyncio.FIRST_EXCEPTION)
                # While the edge is cut, the end of a connection is not forwarded either.
                await edge.there.passable()
                await edge.back.passable()
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        finally:
            to_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
    """Forwards data until the sender has ended, and forwards that end."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_ON_THE_WAY)
    loop = asyncio.get_running_loop()

    async def take() -> None:
        while True:
            try:
                data = await reader.read(CHUNK)
            except OSError:
                data = b""
            await waiting.put((loop.time() + way.delay_s, data))
            if not data:
                return

    async def give() -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if way.bytes_per_s:
                await asyncio.sleep(len(data) / way.bytes_per_s)
            await way.passable()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            way.count(len(data), due - way.delay_s)
            await writer.drain()

    taking = asyncio.create_task(take())
    try:
        await give()
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


class Network:
    """Direct connections."""

    @asynccontextmanager
    async def between(self, layout: Layout, pids: Mapping[int, str]) -> AsyncIterator[Layout]:
        """Returns the layout to start. pids: process names by id, filled in as they start."""
        yield layout


class ProxiedNetwork(Network):
    """Connections that can be cut, by the names of caller and callee."""

    def __init__(self) -> None:
        self._edges: dict[tuple[str, str], Edge] = {}

    def edge(self, who: str, callee: str) -> Edge:
        """Returns the edge with all data from a process to a worker, and the answers."""
        return self._edges.setdefault((who, callee), Edge())

    @asynccontextmanager
    async def between(self, layout: Layout, pids: Mapping[int, str]) -> AsyncIterator[Layout]:
        workers = [spec for spec in layout.processes if spec.role != "router"]
        taken = [
            split(address, "listen")[1]
            for spec in layout.processes
            for address in (spec.grpc, spec.metrics)
        ]
        ports = dict(zip(workers, free_ports(len(workers), avoid=taken), strict=True))
        proxies = {spec.grpc: f"{HOST}:{port}" for spec, port in ports.items()}
        async with AsyncExitStack() as ends:
            for spec, port in ports.items():
                proxy = Proxy(
                    proxies[spec.grpc], spec.grpc, partial(self._edge_of, spec.name, port, pids)
                )
                await proxy.start()
                ends.push_async_callback(proxy.close)
            redirected = [_redirected(spec, proxies) for spec in layout.processes]
            yield replace(layout, processes=tuple(redirected))

    def _edge_of(
        self, callee: str, port: int, pids: Mapping[int, str], local_port: int
    ) -> Edge | None:
        who = caller(local_port, port, pids)
        return self.edge(who, callee) if who else None


def _redirected(spec: ProcessSpec, proxies: Mapping[str, str]) -> ProcessSpec:
    """Returns a process that has only addresses of proxies."""
    if spec.role != "router":
        return replace(spec, command=(*spec.command, "--advertise", proxies[spec.grpc]))
    command = [_translated(word, proxies) for word in spec.command]
    return replace(spec, command=tuple(command))


def _translated(word: str, proxies: Mapping[str, str]) -> str:
    """Replaces workers' addresses in a list by proxies' addresses; returns other words as is."""
    return ",".join(proxies.get(part, part) for part in word.split(","))
