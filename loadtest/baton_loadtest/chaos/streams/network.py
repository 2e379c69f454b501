"""What lies between the processes of a run: a proxy before every worker, an edge for each caller.

Routers are told of proxies instead of workers, and a worker tells its peers its proxy's address as
its own, as it would behind any other network; so nothing in a process is different from service.
Shared memory, which KV moves through on one machine, goes past all proxies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from baton.cli.layout import Layout, ProcessSpec
from baton.cli.ports import HOST, free_ports
from baton.rpc.address import split
from baton_loadtest.chaos.streams.callers import caller
from baton_loadtest.chaos.streams.proxy import Edge, Proxy


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
