"""Workers behind a DNS name, such as a headless service's.

The name is looked up again on a timer, and sooner when a worker does not answer. A failed look-up
changes nothing, and that a name has no address is believed only when it is told several times in a
row: name servers restart, too.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from baton.router.workers.broadcast import Broadcast
from baton.rpc.address import join

log = logging.getLogger(__name__)

MAX_ADDRESSES = 4096
LOOKUP_S = 10.0
"""A look-up that takes longer has failed for now."""

LEAST_PAUSE_S = 0.5
"""Between two look-ups, whoever asks for them."""

BELIEVED = 3
"""So many times in a row a name must have no address before it is taken to have none."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""All addresses of a name with a port, as host:port. Raises OSError, gaierror among them."""

_NO_ADDRESS = {
    code for name in ("EAI_NONAME", "EAI_NODATA") if (code := getattr(socket, name, None))
}


async def resolve(name: str, port: int) -> list[str]:
    """Asks the system, as any program does: hosts file, search domains, IPv4 and IPv6."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [join(str(entry[4][0]), port) for entry in found]


class DnsSource:
    """every_s: between two look-ups while all is well, varied by a fifth."""

    def __init__(
        self, name: str, port: int, *, every_s: float = 5.0, resolve: Resolve = resolve
    ) -> None:
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
        """doubted: how often there was doubt when the last look-up began."""
        least = min(LEAST_PAUSE_S, self._every_s) * random.uniform(1.0, 1.5)
        await asyncio.sleep(least)
        whole = self._every_s * random.uniform(0.8, 1.2)
        if failures:
            whole = min(whole, least * 2.0 ** min(failures - 1, 10))
        if self._doubted == doubted and whole > least:
            await self._doubt.wait(whole - least)

    async def _look(self) -> frozenset[str] | None:
        """What the name stands for, or None when that is not known now."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._resolve(self._name, self._port))
        await asyncio.wait({self._running}, timeout=LOOKUP_S)
        if not self._running.done():
            # Nothing stops the system's resolver; the same look-up is waited for again.
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
