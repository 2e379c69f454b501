"""Discovery: the addresses of workers by role, as they appear and disappear.

An operator gives the processes of each role in one of these forms:

    host:port,host:port                     a list
    dns:///name:port                        every address (A, AAAA) of a name
    k8s:///service[.namespace]:port         every endpoint of a Kubernetes service; port: a number,
                                            or a port's name

A worker that disappears from a source is not dropped for that: the pools keep every worker that
still answers. A source that fails or lags yields nothing, which loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from batonlm.core.errors import InvalidArgument
from batonlm.router.workers.discovery_k8s import KubernetesSource, answers, api_of, runs
from batonlm.router.workers.shared_stream import Broadcast
from batonlm.rpc.address import join, split
from batonlm.rpc.kubernetes_api import KubernetesApi

DNS_INTERVAL_S = 5.0
"""Seconds between two look-ups of the same name."""

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.IGNORECASE)
_SERVICE = re.compile(rf"({_LABEL})(\.({_LABEL}))?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ListTarget:
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DnsTarget:
    name: str
    port: int


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """A service of Kubernetes."""

    service: str
    namespace: str
    """"" means the router's own."""
    port: str
    """Digits, or the name of one of the service's ports."""


Target = ListTarget | DnsTarget | ServiceTarget


def parse_target(texts: Sequence[str], field: str) -> Target:
    """Parses one option. Raises InvalidArgument that names the field."""
    named = [text for text in texts if "//" in text]
    if not named:
        for address in texts:
            if not split(address, field)[1]:
                raise InvalidArgument(f"{address!r} has no port to connect to", field=field)
        return ListTarget(tuple(texts))
    if len(texts) > 1:
        raise InvalidArgument(f"{named[0]!r} must stand alone, not in a list", field=field)
    scheme, _, rest = texts[0].partition(":///")
    name, _, port = rest.rpartition(":")
    match scheme:
        case "dns" if _HOST.fullmatch(name) and _is_port(port):
            return DnsTarget(name, int(port))
        case "k8s" if (found := _SERVICE.fullmatch(name)) and (
            _is_port(port) or _PORT_NAME.fullmatch(port)
        ):
            return ServiceTarget(found[1], found[4] or "", port)
    raise InvalidArgument(
        f"{texts[0]!r} is neither dns:///name:port nor k8s:///service[.namespace]:port",
        field=field,
    )


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535


class AddressSource(Protocol):
    """A source of the addresses of one role: DNS, Kubernetes, or a list."""

    lists: bool
    """Whether it has an address, or may have one later."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yields all addresses (host:port) as soon as they are known and after every change,
        without end. Called once. A source that fails yields nothing; it never raises."""

    def look_again(self) -> None:
        """A worker did not answer, so the known addresses may be outdated. Cheap, and called
        often."""


class Discovery:
    """The sources by role. A role without a source is empty.

    A source runs only while it is watched.
    """

    def __init__(self, sources: Mapping[str, AddressSource]) -> None:
        self._sources = sources

    def source(self, role: str) -> AddressSource:
        return self._sources.get(role) or StaticSource(())

    def lists(self, role: str) -> bool:
        """Returns whether the role's source has an address, or may have one later."""
        return self.source(role).lists


class StaticSource:
    """A list that never changes."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)
        self.lists = bool(self._addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses
        await asyncio.get_running_loop().create_future()

    def look_again(self) -> None:
        """Does nothing: a list is never outdated."""


class StaticDiscovery(Discovery):
    """Lists for all roles: role -> addresses."""

    def __init__(self, addresses: Mapping[str, Iterable[str]]) -> None:
        super().__init__({role: StaticSource(found) for role, found in addresses.items()})


log = logging.getLogger(__name__)

MAX_ADDRESSES = 4096
LOOKUP_S = 10.0
"""Seconds after which a look-up counts as failed."""

LEAST_PAUSE_S = 0.5
"""Least seconds between two look-ups."""

BELIEVED = 3
"""Consecutive empty answers after which a name counts as having no address."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns all addresses of a name with a port, as host:port. Raises OSError, including gaierror."""

_NO_ADDRESS = {
    code for name in ("EAI_NONAME", "EAI_NODATA") if (code := getattr(socket, name, None))
}


async def resolve(name: str, port: int) -> list[str]:
    """Uses the system's resolver: hosts file, search domains, IPv4 and IPv6."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [join(str(entry[4][0]), port) for entry in found]


class DnsSource:
    """Workers behind a DNS name, such as that of a headless service.

    The name is looked up on a timer, and sooner when a worker does not answer. A failed look-up
    changes nothing, and a name counts as empty only after BELIEVED consecutive empty answers,
    because name servers restart, too.
    """

    lists = True

    def __init__(
        self, name: str, port: int, *, every_s: float = 5.0, resolve: Resolve = resolve
    ) -> None:
        """every_s: between two successful look-ups, varied by a fifth."""
        self._name, self._port, self._every_s = name, port, every_s
        self._resolve = resolve
        self._doubted = 0
        self._doubt = Broadcast()
        self._running: asyncio.Future[list[str]] | None = None
        self._empty = 0
        self._failing = False

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        failures = 0
        try:
            while True:
                doubted = self._doubted
                found = await self._look()
                if found is not None and found != known:
                    known = found
                    yield found
                failures = failures + 1 if found is None else 0
                await self._pause(failures, doubted)
        finally:
            if self._running is not None:
                self._running.cancel()

    def look_again(self) -> None:
        self._doubted += 1
        self._doubt.set()

    async def _pause(self, failures: int, doubted: int) -> None:
        """doubted: the number of calls to `look_again` when the last look-up began."""
        least = min(LEAST_PAUSE_S, self._every_s) * random.uniform(1.0, 1.5)
        await asyncio.sleep(least)
        whole = self._every_s * random.uniform(0.8, 1.2)
        if failures:
            whole = min(whole, least * 2.0 ** min(failures - 1, 10))
        if self._doubted == doubted and whole > least:
            await self._doubt.wait(whole - least)

    async def _look(self) -> frozenset[str] | None:
        """Returns the addresses of the name, or None when they are unknown now."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._resolve(self._name, self._port))
        await asyncio.wait({self._running}, timeout=LOOKUP_S)
        if not self._running.done():
            # The system's resolver cannot be cancelled, so the same look-up is awaited again.
            return self._failed("no answer in time")
        looked, self._running = self._running, None
        try:
            found = sorted(set(looked.result()))
        except (OSError, UnicodeError) as error:
            absent = isinstance(error, socket.gaierror) and error.errno in _NO_ADDRESS
            if not absent:
                self._empty = 0
                return self._failed(type(error).__name__)
            found = []
        self._empty = 0 if found else self._empty + 1
        if not found and self._empty < BELIEVED:
            return self._failed("it has no address")
        if len(found) > MAX_ADDRESSES:
            log.warning("%s has %d addresses: %d are used", self._name, len(found), MAX_ADDRESSES)
        if self._failing:
            log.info("%s can be looked up again", self._name)
        self._failing = False
        return frozenset(found[:MAX_ADDRESSES])

    def _failed(self, why: str) -> frozenset[str] | None:
        if not self._failing:
            log.warning("%s cannot be looked up (%s); what is known stays", self._name, why)
        self._failing = True
        return None


async def discovery_of(places: Mapping[str, Sequence[str]]) -> Discovery:
    """Creates the sources without starting them.

    places: role to its option's value; the option's name is the role's plural. Raises
    InvalidArgument when Kubernetes is requested and cannot be reached.
    """
    api: KubernetesApi | None = None
    sources: dict[str, AddressSource] = {}
    for role, texts in places.items():
        match parse_target(texts, f"{role}s"):
            case ListTarget(addresses):
                sources[role] = StaticSource(addresses)
            case DnsTarget(name, port):
                sources[role] = DnsSource(name, port, every_s=DNS_INTERVAL_S)
            case ServiceTarget(service, namespace, port_name):
                if api is None:
                    api = await asyncio.to_thread(api_of, f"{role}s")
                wanted = answers if role == "router" else runs
                namespace = namespace or api.namespace
                sources[role] = KubernetesSource(api, namespace, service, port_name, wanted)
    return Discovery(sources)


class Replicas:
    """The number of live routers, by which budgets are shared."""

    def __init__(self, discovery: Discovery | None, processes: int = 1) -> None:
        """discovery: None when no option names the routers; then there is this one only. processes:
        of each of them, which count as routers of their own."""
        self._discovery = discovery
        self._processes = self._live = processes

    def live_replicas(self) -> int:
        """Returns the live routers, including this one: at least 1."""
        return self._live

    async def run(self) -> None:
        """Follows discovery, if configured, until cancelled."""
        if self._discovery is not None:
            async for found in self._discovery.source("router").watch():
                self._live = max(1, len(found)) * self._processes
