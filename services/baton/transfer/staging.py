"""A worker's staging memory with every transport that can reach it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton.core.errors import InvalidArgument, Unavailable
from baton.transfer import nixl
from baton.transfer.buffers import StagingPool
from baton.transfer.faults import NO_FAULTS, Faults
from baton.transfer.loopback import LoopbackTransport
from baton.transfer.reader import Reader
from baton.transfer.transport import KvTransport, TransportError
from baton.transfer.ucx import KvNetwork, Ucx, choose, inherited

CHOICES = ("auto", "nixl", "loopback")

log = logging.getLogger(__name__)


class Staging:
    """One ring and its readers by transport name, best first. ucx: how NIXL may move KV.

    quiet: False once closed with a transfer orphaned, which may still write into the ring. Then
    nothing of it may be torn down any more: the process has to end without going through that.
    """

    def __init__(
        self,
        ring: StagingPool,
        readers: dict[str, Reader],
        ucx: Ucx,
        *,
        named: bool = True,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """named: each transport was asked for by name, so that none may be missing."""
        self.ring, self.readers, self.ucx, self.faults = ring, readers, ucx, faults
        self.quiet, self._named = True, named

    @classmethod
    async def open(
        cls,
        instance_id: str,
        *,
        transport: str,
        num_buffers: int,
        buffer_bytes: int,
        ucx: Ucx | None = None,
        faults: Faults = NO_FAULTS,
    ) -> Staging:
        """Allocates the ring and starts the transports.

        transport: nixl, loopback, or auto (both, NIXL first, which may be missing). ucx: None stays
        on this machine. Raises Unavailable when the transport that was named cannot be started,
        InvalidArgument when the environment sends UCX where it may not go.
        """
        if transport not in CHOICES:
            raise InvalidArgument(f"must be one of {', '.join(CHOICES)}", field="transport")
        allowed = ucx or choose(KvNetwork.LOCAL, inherited=inherited())
        ring = StagingPool(num_buffers, buffer_bytes)
        makers: dict[str, Callable[[], KvTransport]] = {
            "nixl": lambda: faults.transport(nixl.NixlTransport(ring, instance_id, allowed)),
            "loopback": lambda: faults.transport(LoopbackTransport(ring)),
        }
        readers: dict[str, Reader] = {}
        for name, make in makers.items():
            if transport not in ("auto", name) or (transport == "auto" and not _installed(name)):
                continue
            reader = Reader(make)
            try:
                await reader.start()
            except TransportError:
                if transport == "auto":
                    continue
                ring.close()
                raise Unavailable(f"the KV transport {name} could not be started") from None
            readers[name] = reader
        return cls(ring, readers, allowed, named=transport != "auto", faults=faults)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.readers)

    async def give_up(self, name: str, why: str) -> None:
        """Goes on without a transport that does not work.

        Raises Unavailable when it was asked for by name, or is the last one.
        """
        if self._named or len(self.readers) == 1:
            raise Unavailable(f"the KV transport {name} does not work here: {why}")
        log.warning("KV will not move over %s, which does not work here: %s", name, why)
        reader = self.readers.pop(name)
        self.quiet = self.quiet and reader.idle
        await reader.close()

    async def close(self) -> None:
        """Stops the transports and unmaps the ring, unless a transfer orphaned may still write."""
        for reader in self.readers.values():
            self.quiet = self.quiet and reader.idle
            await reader.close()
        if self.quiet:
            self.ring.close()


def _installed(name: str) -> bool:
    return name != "nixl" or nixl.available()
