"""A worker's staging memory with every transport that can reach it; knows nothing of hand-overs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.core.errors import InvalidArgument, Unavailable
from baton.kv import nixl
from baton.kv.loopback import LoopbackTransport
from baton.kv.reader import Reader
from baton.kv.slots import SlotRing
from baton.kv.transport import KvTransport, TransportError
from baton.kv.ucx import KvNetwork, Ucx, choose, inherited

CHOICES = ("auto", "nixl", "loopback")


class Staging:
    """One ring and its readers by transport name, best first. ucx: how NIXL may move KV."""

    def __init__(self, ring: SlotRing, readers: Mapping[str, Reader], ucx: Ucx) -> None:
        self.ring, self.readers, self.ucx = ring, readers, ucx

    @classmethod
    async def open(
        cls,
        incarnation: str,
        *,
        transport: str,
        num_slots: int,
        slot_bytes: int,
        ucx: Ucx | None = None,
    ) -> Staging:
        """Allocates the ring and starts the transports.

        transport: nixl, loopback, or auto (both, NIXL first, which may be missing). ucx: None stays
        on this machine. Raises Unavailable when the transport that was named cannot be started,
        InvalidArgument when the environment sends UCX where it may not go.
        """
        if transport not in CHOICES:
            raise InvalidArgument(f"must be one of {', '.join(CHOICES)}", field="transport")
        allowed = ucx or choose(KvNetwork.LOCAL, inherited=inherited())
        ring = SlotRing(num_slots, slot_bytes)
        makers: dict[str, Callable[[], KvTransport]] = {
            "nixl": lambda: nixl.NixlTransport(ring, incarnation, allowed),
            "loopback": lambda: LoopbackTransport(ring),
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
        return cls(ring, readers, allowed)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.readers)

    async def close(self) -> None:
        """Stops the transports and unmaps the ring, unless a transfer in limbo may still write."""
        quiet = True
        for reader in self.readers.values():
            quiet = quiet and reader.idle
            await reader.close()
        if quiet:
            self.ring.close()


def _installed(name: str) -> bool:
    return name != "nixl" or nixl.available()
