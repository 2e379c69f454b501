"""Where tests and experiments break hand-overs; a worker that serves uses `NO_FAULTS`.

`baton.testing.faults` lists the points and breaks things there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from baton.transfer.transport import KvTransport

In = TypeVar("In")
Out = TypeVar("Out")


class Faults:
    """Lets everything pass. Subclasses break things at points; all points are reached through it.

    `at` is called on the event loop within a side's work, the transport's on the reader's thread.
    """

    async def at(self, point: str, kv_chunk: memoryview | None = None) -> None:
        """A point of a side's own work was reached. kv_chunk: header and payload in a buffer."""

    def hearing(self, side: str, incoming: AsyncIterator[In]) -> AsyncIterator[In]:
        """The messages of one stream as `side` hears them."""
        return incoming

    def saying(
        self, side: str, send: Callable[[Out], Awaitable[None]]
    ) -> Callable[[Out], Awaitable[None]]:
        """How `side` sends the messages of one stream."""
        return send

    def transport(self, transport: KvTransport) -> KvTransport:
        """How a transport's reads go."""
        return transport


NO_FAULTS = Faults()
