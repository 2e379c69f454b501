"""What lies between the processes of a run: a proxy before every worker, an edge for each caller.

Routers are told of proxies instead of workers, and a worker tells its peers its proxy's address as
its own, as it would behind any other network; so nothing in a process is different from service.
Shared memory, which KV moves through on one machine, goes past all proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from baton.cli.layout import Layout, ProcessSpec
from baton.cli.ports import HOST, free_ports
from baton.rpc.address import split
from baton_loadtest.chaos.streams.load import caller

# A TCP proxy before one process, which can cut, delay and throttle what each caller says to it.
#
# What is cut is neither lost nor refused: it stays where it is, connections stay open, a
# connection's end is not passed on, as when a network drops all packets of a direction. What TCP
# would send again flows when the edge is whole again.


CHUNK = 64 * 1024
MAX_ON_THE_WAY = 64
"""Chunks of one direction of a connection: beyond, its sender has to wait."""


class Way:
    """One direction of an edge. delay_s: of every byte. bytes_per_s: of a connection; 0: no bound.
    num_bytes: that came through. num_fresh: of these, what was said since it was healed last.
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
    """Listens where callers are told that the callee is.

    edge_of: the edge of whoever connected from a port of this machine. None: nobody that is to be
    let through; as when it has hung up before anyone looked.
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
            # A gone caller or callee ends a connection; that is all that is to know of it.
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
                # That an end broke off is as little to be heard through a cut as anything else.
                await edge.there.passable()
                await edge.back.passable()
            finally:
                there.cancel()
                back.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        finally:
            to_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
    """Until the sender has ended, and that was passed on too."""
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
    """Plain connections."""

    @asynccontextmanager
    async def between(self, layout: Layout, pids: Mapping[int, str]) -> AsyncIterator[Layout]:
        """The processes as they are to be started. pids: names by process id, as they start."""
        yield layout


class ProxiedNetwork(Network):
    """Connections that can be cut, by the names of caller and callee."""

    def __init__(self) -> None:
        self._edges: dict[tuple[str, str], Edge] = {}

    def edge(self, who: str, callee: str) -> Edge:
        """All that a process says to a worker, and the answers."""
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
            told = [_told(spec, proxies) for spec in layout.processes]
            yield replace(layout, processes=tuple(told))

    def _edge_of(
        self, callee: str, port: int, pids: Mapping[int, str], local_port: int
    ) -> Edge | None:
        who = caller(local_port, port, pids)
        return self.edge(who, callee) if who else None


def _told(spec: ProcessSpec, proxies: Mapping[str, str]) -> ProcessSpec:
    """A process that knows proxies only."""
    if spec.role != "router":
        return replace(spec, command=(*spec.command, "--advertise", proxies[spec.grpc]))
    command = [_translated(word, proxies) for word in spec.command]
    return replace(spec, command=tuple(command))


def _translated(word: str, proxies: Mapping[str, str]) -> str:
    """A list of addresses with proxies in place of workers; any other word as it is."""
    return ",".join(proxies.get(part, part) for part in word.split(","))
