"""The port through which parcels move between rings; knows nothing of hand-overs or parcels.

A transport READs from a peer's ring into slots of our own. It has no timeout, no abort and no
revocation, because what it stands for (NIXL over UCX) has none: a posted read ends when `poll` says
so and `release` succeeded, and until then it may write into its slot.

All calls come from one thread, that of `baton.kv.reader.Reader`, and may block it. What goes wrong
after `post` returned is told as FAILED. Implementations:
`baton.kv.nixl.NixlTransport`, and `baton.kv.loopback.LoopbackTransport` without NIXL for processes
of one machine; both pass `tests/kv/test_transport_contract.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from baton.core.handover_messages import RingDescription


class TransportError(Exception):
    """The transport cannot do what was asked: unknown or unreachable peer, out of range."""


class ReadState(Enum):
    RUNNING = 1
    DONE = 2
    FAILED = 3


class KvTransport(Protocol):
    """Moves bytes between two rings. Handles are opaque and owned by whoever posted."""

    @property
    def name(self) -> str: ...

    def metadata(self) -> bytes:
        """What a peer needs to reach our ring; opaque, of this machine and process start."""

    def add_peer(self, peer: str, metadata: bytes, ring: RingDescription) -> None:
        """Makes a peer's ring reachable. Raises TransportError; then nothing is left behind.

        Our own ring is reached under our own name, the incarnation.
        """

    def remove_peer(self, peer: str) -> None:
        """Forgets a peer. Only when none of its reads is running. Unknown peers are no error."""

    def post(self, peer: str, remote_slot: int, local_slot: int, num_bytes: int) -> object:
        """Starts a read of a slot's first num_bytes into ours. Returns a handle for `poll`.

        Raises TransportError when nothing was started.
        """

    def poll(self, handle: object) -> ReadState:
        """Where a posted read stands. Once DONE or FAILED it stays so."""

    def release(self, handle: object) -> None:
        """Frees a handle. Only after `poll` said DONE or FAILED.

        Raises TransportError when the slot may not be reused yet; then it is to be called again.
        """

    def close(self) -> None:
        """Lets go of the ring. Only when no read is running; idempotent."""


def check_range(
    theirs: RingDescription, remote_slot: int, ours: RingDescription, local_slot: int, size: int
) -> None:
    """Raises TransportError when a read would leave either slot."""
    if not (0 <= remote_slot < theirs.num_slots and 0 <= local_slot < ours.num_slots):
        raise TransportError("no such slot")
    if not 0 < size <= min(theirs.slot_bytes, ours.slot_bytes):
        raise TransportError("a read must fit both slots")
