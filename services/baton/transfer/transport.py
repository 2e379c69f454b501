"""The port through which KV chunks move between rings.

A transport READs from a peer's ring into buffers of our own. It has no timeout, no abort and no
revocation, because what it stands for (NIXL over UCX) has none: a posted read ends when `poll` says
so and `release` succeeded, and until then it may write into its buffer.

All calls come from one thread, that of `baton.transfer.reader.Reader`, and may block it. What goes
wrong after `post` returned is told as FAILED. Implementations: `baton.transfer.nixl.NixlTransport`,
and `baton.transfer.loopback.LoopbackTransport` without NIXL for processes of one machine; both pass
`tests/kv/test_transport_contract.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from baton.core.handover.messages import StagingPoolDescription


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

    def add_peer(self, peer: str, metadata: bytes, ring: StagingPoolDescription) -> None:
        """Makes a peer's ring reachable. Raises TransportError; then nothing is left behind.

        Our own ring is reached under our own name, the instance id.
        """

    def remove_peer(self, peer: str) -> None:
        """Forgets a peer. Only when none of its reads is running. Unknown peers are no error."""

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        """Starts a read of a buffer's first num_bytes into ours. Returns a handle for `poll`.

        Raises TransportError when nothing was started.
        """

    def poll(self, handle: object) -> ReadState:
        """Where a posted read stands. Once DONE or FAILED it stays so."""

    def release(self, handle: object) -> None:
        """Frees a handle. Only after `poll` said DONE or FAILED.

        Raises TransportError when the buffer may not be reused yet; then it is to be called again.
        """

    def close(self) -> None:
        """Lets go of the ring. Only when no read is running; idempotent."""


def check_range(
    theirs: StagingPoolDescription,
    remote_buffer: int,
    ours: StagingPoolDescription,
    local_buffer: int,
    size: int,
) -> None:
    """Raises TransportError when a read would leave either buffer."""
    if not (0 <= remote_buffer < theirs.num_buffers and 0 <= local_buffer < ours.num_buffers):
        raise TransportError("no such buffer")
    if not 0 < size <= min(theirs.buffer_bytes, ours.buffer_bytes):
        raise TransportError("a read must fit both buffers")
