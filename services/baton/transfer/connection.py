"""How a receiver speaks to a sender, as ports.

`baton.rpc.handover` fills them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from baton.core.handover.messages import Handshake, HandshakeRequest, ReceiverMessage, SenderMessage
from baton.core.request.model import WorkerIdentity


class CollectStream(Protocol):
    """The receiver's end of one Collect stream, open from the start.

    Iterating gives the sender's messages and ends, or raises Unavailable, when the stream does; it
    may be abandoned and cancelled without ending the stream. `send` raises Unavailable when the
    stream is broken. `close` lets what was sent arrive, bounded, then ends the stream.
    """

    def __aiter__(self) -> AsyncIterator[SenderMessage]: ...

    async def send(self, message: ReceiverMessage) -> None: ...

    async def close(self) -> None: ...


class SenderConnection(Protocol):
    """How one sender is spoken to. Implemented by `baton.rpc.handover.GrpcSenderConnection`."""

    async def meet(self, introduction: HandshakeRequest) -> Handshake:
        """Raises Incompatible, Unavailable."""

    def collect(self) -> CollectStream:
        """Opens a Collect stream; what goes wrong shows when it is used."""


Connect = Callable[[WorkerIdentity], SenderConnection]
