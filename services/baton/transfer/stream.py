"""One end of a Collect stream: sending in order, heartbeats, deadlines of states, and how a
hand-over ends early.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from baton.core.errors import BatonError, DeadlineExceeded, Internal, Unavailable
from baton.core.handover.messages import Heartbeat
from baton.core.handover.table import HandoverEvent, Limit, State

Names = Mapping[str, str]
"""What names the request that a hand-over is for in log lines."""
NO_NAMES: Names = MappingProxyType({})

T = TypeVar("T")


async def race(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first one ends, then cancels the others and waits for them.

    Raises what the first one raised (when several failed together: the first in order).
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await outlast(tasks)
    for task in ended:
        task.result()


async def outlast(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Waits until all tasks have ended, whatever they raise and however often we are cancelled.

    For work that must not be left alone because it touches memory that is about to be given back.
    A cancellation that came meanwhile is raised afterwards.
    """
    pending, cancelled = set(tasks), False
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
            pending = {task for task in pending if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if cancelled:
        raise asyncio.CancelledError


async def to_end(work: Awaitable[T]) -> T:
    """Awaits work that must not be interrupted; a cancellation of ours is raised after its end."""
    task = asyncio.ensure_future(work)
    await outlast([task])
    return task.result()


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


_log = logging.getLogger(__name__)
_OVER = Limit("nobody", math.inf)


class TransferAborted(Exception):
    """Ends a stream's work. event: what to follow in the table. error: what to tell."""

    def __init__(self, event: HandoverEvent, error: BatonError) -> None:
        super().__init__(error.message)
        self.event, self.error = event, error

    @property
    def peer_knows(self) -> bool:
        return self.event in (HandoverEvent.PEER_FAILED, HandoverEvent.PEER_LOST)


def why(exception: BaseException, about: Names = NO_NAMES) -> TransferAborted:
    """The Ending for whatever stopped the work on a hand-over. about: for log lines."""
    match exception:
        case TransferAborted():
            return exception
        case PeerLost():
            return TransferAborted(HandoverEvent.PEER_LOST, exception)
        case BatonError():
            return TransferAborted(HandoverEvent.CANCEL, exception)
        case _:
            _log.error("a hand-over failed for a fault of our own", exc_info=exception, extra=about)
            return TransferAborted(HandoverEvent.CANCEL, Internal("the hand-over failed"))


class StateTimeout:
    """Watches that no state of a side lasts longer than its limit."""

    def __init__(self, limits: Mapping[State, Limit], state: Callable[[], State]) -> None:
        self._limits, self._state = limits, state
        self.moved()

    def moved(self) -> None:
        """The hand-over made progress: its state's time starts again."""
        self._since = asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Raises Ending(DEADLINE), up to a second late, when a state has outlasted its limit."""
        while True:
            limit = self._limits.get(self._state(), _OVER)
            left = self._since + limit.seconds - asyncio.get_running_loop().time()
            if left <= 0:
                error = DeadlineExceeded(f"the hand-over waited too long for {limit.owner}")
                raise TransferAborted(HandoverEvent.DEADLINE, error)
            await asyncio.sleep(min(left, 1.0))
