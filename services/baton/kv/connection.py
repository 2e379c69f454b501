"""How a collector speaks to a giver, as ports; knows neither gRPC nor what is said when.

`baton.rpc.handover` fills them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from baton.core.handover_messages import CollectorMessage, GiverMessage, Introduction, Meeting
from baton.core.model import WorkerIdentity


class CollectStream(Protocol):
    """The collector's end of one Collect stream, open from the start.

    Iterating gives the giver's messages and ends, or raises Unavailable, when the stream does; it
    may be abandoned and cancelled without ending the stream. `send` raises Unavailable when the
    stream is broken. `close` lets what was sent arrive, bounded, then ends the stream.
    """

    def __aiter__(self) -> AsyncIterator[GiverMessage]: ...

    async def send(self, message: CollectorMessage) -> None: ...

    async def close(self) -> None: ...


class GiverConnection(Protocol):
    """How one giver is spoken to. Implemented by `baton.rpc.handover.GrpcGiverConnection`."""

    async def meet(self, introduction: Introduction) -> Meeting:
        """Raises Incompatible, Unavailable."""

    def collect(self) -> CollectStream:
        """Opens a Collect stream; what goes wrong shows when it is used."""


Connect = Callable[[WorkerIdentity], GiverConnection]
