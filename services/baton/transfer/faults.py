"""The named points of a hand-over at which something can be made to go wrong, and the port to it.

Knows where the points are, not what happens there: `NO_FAULTS` lets everything pass and is what
every worker runs with; `baton.transfer.injector.Injector` breaks what it was told to break.

A point is "side.what". Those of messages lie where a side says or hears one. The others lie within
a side's own work; at `sender.sealed` and `receiver.read` a whole KV chunk lies in a buffer, which
is where it can be damaged so that the other side, or our own verification, has to find it.
`transport.read` is a read that was just posted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from baton.core.handover.messages import (
    Announced,
    Completed,
    Credit,
    Finished,
    Full,
    Granted,
    KvChunkCollected,
    KvChunkReady,
    OpenHandover,
    Tokens,
)
from baton.transfer.transport import KvTransport

In = TypeVar("In")
Out = TypeVar("Out")

MESSAGES: Mapping[type, str] = {
    OpenHandover: "opened",
    Announced: "announced",
    Granted: "granted",
    Full: "refused",
    Finished: "finished",
    Credit: "credited",
    KvChunkReady: "told",
    KvChunkCollected: "confirmed",
    Tokens: "tokens_told",
    Completed: "completed",
}
"""What the point of a message is called, on the side that says it as on the one that hears it."""

SENDER_WORK = ("sender.buffer_taken", "sender.packed", "sender.sealed")
RECEIVER_WORK = (
    "receiver.reserved",
    "receiver.reading",
    "receiver.read",
    "receiver.verified",
    "receiver.unpacked",
)
TRANSPORT_READ = "transport.read"

MESSAGE_POINTS = tuple(
    f"{side}.{of}" for side in ("sender", "receiver") for of in MESSAGES.values()
)
POINTS = (*MESSAGE_POINTS, *SENDER_WORK, *RECEIVER_WORK, TRANSPORT_READ)


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
