"""One end of a Collect stream: sending in order, heartbeats, and noticing silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.core.errors import Unavailable
from baton.core.handover.messages import Heartbeat
from baton.transfer.tasks import outlast

In = TypeVar("In")
Out = TypeVar("Out")


class PeerLost(Unavailable):
    """The stream broke, ended too early or fell silent."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """heartbeat_s: say something at least this often. missed: so many in a row mean dead."""

    heartbeat_s: float = 0.5
    missed: int = 4


class HeartbeatStream(Generic[In, Out]):
    """Our end of one stream. send: writes one message; calls are not made concurrently.

    A write that has begun is never cancelled, because gRPC would end the whole stream with it;
    `close` waits for what is left.
    """

    def __init__(
        self,
        incoming: AsyncIterator[In],
        send: Callable[[Out | Heartbeat], Awaitable[None]],
        liveness: Liveness,
    ) -> None:
        self._incoming, self._send, self._liveness = incoming, send, liveness
        self._turn = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._said = self._heard = True

    async def say(self, message: Out | Heartbeat) -> None:
        """Sends in the order of calls. Raises PeerLost when the stream is broken."""
        self._said = True
        await asyncio.shield(self._begin(message))

    def _begin(self, message: Out | Heartbeat) -> asyncio.Task[None]:
        write = asyncio.create_task(self._write(message))
        self._writes.add(write)
        write.add_done_callback(self._written)
        return write

    def _written(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled():
            # Whoever waits for it still gets it; a heartbeat has nobody who waits.
            write.exception()

    async def _write(self, message: Out | Heartbeat) -> None:
        async with self._turn:
            try:
                await self._send(message)
            except Unavailable as error:
                raise PeerLost(error.message) from None

    async def close(self, timeout_s: float) -> None:
        """Gives writes under way so long to end, then cancels them. Nothing is left running."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=timeout_s)
        left = list(self._writes)
        for write in left:
            write.cancel()
        await outlast(left)

    async def listen(self, handle: Callable[[In], None]) -> None:
        """Hands every message but heartbeats to `handle`. Raises PeerLost when the stream ends."""
        try:
            async for message in self._incoming:
                self._heard = True
                if not isinstance(message, Heartbeat):
                    handle(message)
        except Unavailable as error:
            raise PeerLost(error.message) from None
        raise PeerLost("the other side of the hand-over left")

    async def beat(self) -> None:
        """Sends heartbeats into silence of ours; raises PeerLost on silence of theirs.

        Silence is counted in our own turns, so that a stall of this process is not taken for one of
        the peer: what arrived meanwhile is heard before the next turn.
        """
        silent = 0
        while True:
            await asyncio.sleep(self._liveness.heartbeat_s)
            silent = 0 if self._heard else silent + 1
            if silent >= self._liveness.missed:
                raise PeerLost("the other side of the hand-over fell silent")
            # A frozen peer can block writes for ever; counting its silence must go on.
            if not self._said and not self._writes:
                self._begin(Heartbeat())
            self._said = self._heard = False
