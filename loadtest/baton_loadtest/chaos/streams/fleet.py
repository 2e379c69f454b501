"""A supervised fleet with two workers of each role and one or two routers, for one run.

The supervisor starts and restarts the processes. This module records which processes ended and
whether that was requested: an unrequested end is a finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from baton_loadtest.chaos.streams.network import Network
from baton_loadtest.chaos.world import Broken
from baton_loadtest.launch import environment, say, supervised
from batonlm.cli import state
from batonlm.cli.http_client import met, scrape, total
from batonlm.cli.layout import APART, Layout, ProcessSpec, UpOptions, plan
from batonlm.cli.ports import free_row
from batonlm.cli.supervisor import ChildProcess, Supervisor
from batonlm.rpc.children import FIRST_BACKOFF_S

WORKER_ROLES = ("tokenizer", "prefill", "decode", "detokenizer")
ROLES = (*WORKER_ROLES, "router")


BUSY = "OVERLOADED"
"""The error of a full worker, by which nothing is lost."""


@dataclass(slots=True)
class Hit:
    """A stream that lost a worker, according to the routers' logs."""

    first: float
    """When the first loss was noticed, on the monotonic clock."""
    roles: set[str] = field(default_factory=set)
    """Roles of the lost workers."""


def hits(log: Path) -> dict[str, Hit]:
    """Returns hits by request id, from a log of JSON lines of the current boot."""
    found: dict[str, Hit] = {}
    for noticed, record in records(log):
        if record.get("lost_at") and record["reason"] != BUSY:
            found.setdefault(record["request_id"], Hit(noticed)).roles.add(record["lost_at"])
    return found


def records(log: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields the lines of a log of JSON lines, each with its time on the monotonic clock."""
    to_monotonic = time.monotonic() - time.time()
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "time" in record:
                yield datetime.fromisoformat(record["time"]).timestamp() + to_monotonic, record


OF_EACH = 2
KV_MEMORY_MIB = 64
"""Little more than the concurrent streams need, so that prefixes cached for the reference are
evicted, and are computed and handed over again when a stream is repeated."""

PATIENCE_S = 120.0
REST_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one run of a process."""

    name: str
    signalled: int | None
    """The signal that this module sent, if any."""
    code: int


class Fleet:
    """The running processes, by name. log: the file of all their logs, as JSON lines."""

    def __init__(
        self, layout: Layout, supervisor: Supervisor, ended: list[Ended], signalled: dict[str, int]
    ) -> None:
        self.layout = layout
        self.log = state.log_file()
        self.ended = ended
        self._supervisor = supervisor
        self._specs = {spec.name: spec for spec in layout.processes}
        self._signalled = signalled
        self._withheld: set[str] = set()

    def names(self, *roles: str) -> list[str]:
        return [spec.name for spec in self.layout.processes if spec.role in roles]

    def spec(self, name: str) -> ProcessSpec:
        return self._specs[name]

    def child(self, name: str) -> ChildProcess:
        return self._supervisor.child(name)

    @property
    def routers(self) -> list[str]:
        """The gRPC addresses of the routers."""
        return [self.spec(name).grpc for name in self.names("router")]

    def signal(self, name: str, number: signal.Signals) -> ChildProcess:
        """Sends a signal that ends the process; returns the run that ends by it."""
        child = self.child(name)
        self._signalled[name] = number
        os.kill(child.pid, number)
        return child

    async def gone(self, child: ChildProcess) -> None:
        """Waits for the end of a process. Raises Broken if it does not end."""
        await _within(child.wait(), f"{child.spec.name} to end")

    async def back(self, old: ChildProcess, *, whole: bool = True) -> None:
        """Returns when a process's successor serves and is connected to all that need it. whole:
        whether a router has to count every worker; else one of each role is enough."""
        name, role = old.spec.name, old.spec.role

        async def wait() -> None:
            while self.child(name) is old or not self.child(name).serving.is_set():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S / 4)
            routers = [name] if role == "router" else self.names("router")
            least = None if whole or role != "router" else 1
            await self._met(routers, WORKER_ROLES if role == "router" else (role,), least)

        await _within(wait(), f"{name} to be back")

    async def leave(self, name: str) -> None:
        """Scales down by one: the process drains and is not restarted until `come`."""
        self._supervisor.withhold(name)
        self._withheld.add(name)
        await self.gone(self.signal(name, signal.SIGTERM))

    async def come(self, name: str) -> None:
        """Scales up again."""
        old = self.child(name)
        self._withheld.discard(name)
        self._supervisor.release(name)
        await self.back(old)

    async def whole(self) -> None:
        """Returns when every router counts every worker that should run."""
        await _within(self._met(self.names("router"), WORKER_ROLES), "all workers to be met")

    async def is_met(
        self, router: str, roles: tuple[str, ...] = WORKER_ROLES, least: int | None = None
    ) -> bool:
        """Returns whether a router counts all workers of some roles as live, or at least so
        many."""
        url, token = self.layout.metrics_url(self.spec(router)), self.layout.peer_token
        found = await asyncio.to_thread(met, url, None, token)
        if least is not None:
            return all(found[role] >= least for role in roles)
        wanted = Counter(self.spec(name).role for name in self._specs.keys() - self._withheld)
        return all(found[role] == wanted[role] for role in roles)

    async def _met(
        self, routers: list[str], roles: tuple[str, ...], least: int | None = None
    ) -> None:
        for router in routers:
            while not await self.is_met(router, roles, least):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def metrics(self, name: str) -> dict[str, float]:
        """Raises OSError while the process does not answer."""
        url, token = self.layout.metrics_url(self.spec(name)), self.layout.peer_token
        return await asyncio.to_thread(scrape, url, key=token)

    async def held(self, *names: str) -> float:
        """Returns what processes hold for requests: attempts, sequences, texts, possible leaks."""
        found = await asyncio.gather(*(self.metrics(name) for name in names))
        kinds = ("baton_attempts", "baton_sequences", "baton_leaks")
        return sum(total(one, kind) for one in found for kind in kinds)

    async def at_rest(self, *roles: str) -> float:
        """Returns what processes of these roles, or all workers, still hold some time after all
        streams have ended."""
        names = self.names(*(roles or WORKER_ROLES))
        deadline = asyncio.get_running_loop().time() + REST_S
        while True:
            held = await self.held(*names)
            if not held or asyncio.get_running_loop().time() > deadline:
                return held
            await asyncio.sleep(POLL_S)

    @property
    def unasked(self) -> list[Ended]:
        """Returns the processes that ended without being signalled."""
        return [ended for ended in self.ended if ended.signalled is None]


@asynccontextmanager
async def fleet(
    args: argparse.Namespace,
    *,
    routers: int = 1,
    network: Network | None = None,
    keys: str = "",
    kv_memory_mib: int = KV_MEMORY_MIB,
    engine_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
) -> AsyncIterator[Fleet]:
    """Starts and connects all processes. network: the network between them, if any. keys: the file
    of the API keys that routers accept; empty: they need none. The others are those of UpOptions.

    Raises Broken, StartFailed.
    """
    network = network or Network()
    options = UpOptions(
        tokenizer=OF_EACH,
        prefill=OF_EACH,
        decode=OF_EACH,
        detokenizer=OF_EACH,
        routers=routers,
        transport=args.transport,
        kv_memory_mib=kv_memory_mib,
        local_prefill_tokens=APART,
        keys=keys,
        engine_flags=engine_flags,
        router_flags=router_flags,
    )
    layout = _layout(options)
    ended: list[Ended] = []
    signalled: dict[str, int] = {}
    pids: dict[int, str] = {}

    def notify(what: str, *details: object) -> None:
        if what == "started":
            pids[int(str(details[1]))] = str(details[0])
        if what == "restarting":
            name, code = str(details[0]), int(str(details[1]))
            ended.append(Ended(name, signalled.pop(name, None), code))
            if ended[-1].signalled is None:
                say(f"{name} ended by itself with code {code}")

    with tempfile.TemporaryDirectory() as scratch:
        # The user's own `baton up` must not share these files, which `hits` reads.
        variables = {"XDG_STATE_HOME": str(args.logs or scratch), "BATON_LOG_JSON": "true"}
        with environment(**variables):
            async with (
                network.between(layout, pids) as laid,
                supervised(laid, notify, longest_backoff_s=FIRST_BACKOFF_S) as supervisor,
            ):
                yield Fleet(layout, supervisor, ended, signalled)


def _layout(options: UpOptions) -> Layout:
    """The routers' ports are consecutive; others are chosen if workers were given any of them."""
    while True:
        first = free_row(2 * options.routers)
        grpc_port = first + options.routers
        layout = plan(replace(options, http_port=first, grpc_port=grpc_port))
        addresses = [one for spec in layout.processes for one in (spec.grpc, spec.metrics)]
        if len(set(addresses)) == len(addresses):
            return layout


async def _within(waiting: Awaitable[object], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await waiting
    except TimeoutError:
        raise Broken(f"waited {PATIENCE_S:.0f} s for {what}") from None
