"""One end of a Collect stream: sending in order, heartbeats, deadlines of states, and how a
hand-over ends early.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from batonlm.core.errors import BatonError, DeadlineExceeded, Internal, Unavailable
from batonlm.core.handover.table import HandoverEvent, State, StateLimit

FAREWELL_S = 1.0
"""Longest time for a side's last message, and for writes under way when a stream ends."""

MAX_WAITING = 32
"""Messages that wait to be written; more of them wait for their turn in `send`."""

Names = Mapping[str, str]
"""What names the request that a hand-over is for in log lines."""
NO_NAMES: Names = MappingProxyType({})

T = TypeVar("T")
In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)

_log = logging.getLogger(__name__)
_NO_LIMIT = StateLimit("nobody", math.inf)


class PeerLost(Unavailable):
    """The stream broke, ended too early or fell silent."""


class TransferAborted(Exception):
    """Ends a stream's work."""

    def __init__(self, event: HandoverEvent, error: BatonError) -> None:
        super().__init__(error.message)
        self.event = event
        """What to follow in the table of states."""
        self.error = error
        """What to send to the peer and to raise to the caller."""

    @property
    def peer_knows(self) -> bool:
        return self.event in (HandoverEvent.PEER_FAILED, HandoverEvent.PEER_LOST)


def abortion(exception: BaseException, about: Names = NO_NAMES) -> TransferAborted:
    """The TransferAborted for whatever stopped the work on a hand-over. about: for log lines."""
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


@dataclass(frozen=True, slots=True)
class Liveness:
    """When silence on a stream means that its peer is dead."""

    heartbeat_s: float = 0.5
    """Something is sent at least this often."""
    missed: int = 4
    """Silent turns in a row, of heartbeat_s each, that mean death."""


def joined(messages: Sequence[Out]) -> Out:
    """One message of a Collect stream that holds all of these, of which there is at least one."""
    if len(messages) == 1:
        return messages[0]
    holder: Any = type(messages[0])()
    holder.several.messages.extend(messages)
    return cast(Out, holder)


def parts(message: In) -> Sequence[In]:
    """The inverse of `joined`."""
    whole: Any = message
    return whole.several.messages if whole.WhichOneof("message") == "several" else (message,)


class HeartbeatStream(Generic[In, Out]):
    """Our end of one stream.

    A message in Python costs more than most of what it says, so those that are sent in the same
    turn of the event loop, or while another one is being written, travel as one.

    A write that has begun is never cancelled, because gRPC would end the whole stream with it;
    `close` waits for what is left.
    """

    def __init__(
        self,
        incoming: AsyncIterator[In],
        send: Callable[[Out], Awaitable[None]],
        heartbeat: Out,
        liveness: Liveness,
    ) -> None:
        """send: writes one message; calls are not made concurrently. heartbeat: what to send into
        silence."""
        self._incoming, self._send = incoming, send
        self._heartbeat, self._liveness = heartbeat, liveness
        self.joins = False
        """Whether the peer understands messages that hold several."""
        self._outbox: list[Out] = []
        self._filled = asyncio.Event()
        self._turn = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._sent = self._received = True

    async def send(self, message: Out) -> None:
        """Sends in the order of calls. `deliver` writes it, and raises what goes wrong."""
        self._outbox.append(message)
        self._filled.set()
        if len(self._outbox) > MAX_WAITING:
            await self.flush()

    async def deliver(self) -> None:
        """Writes what is sent. Raises PeerLost when the stream is broken."""
        while True:
            await self._filled.wait()
            # What others send in this turn of the event loop goes with it.
            await asyncio.sleep(0)
            await self.flush()

    async def flush(self) -> None:
        """Returns when all that was sent is written. Raises PeerLost when the stream is broken."""
        while self._outbox or self._writes:
            if self._outbox:
                self._begin()
            await asyncio.wait(self._writes)
        if self._broken is not None:
            raise self._broken

    async def send_last(self, message: Out) -> None:
        """Tries to send a message to a peer that may be gone. Bounded; raises nothing."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.send(message)
                await self.flush()
        except Exception:
            # The stream is broken, and the peer finds out by that.
            return

    async def close(self) -> None:
        """Gives writes under way FAREWELL_S to end, then cancels them. Nothing is left running."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=FAREWELL_S)
        left = list(self._writes)
        for write in left:
            write.cancel()
        await outlast(left)

    async def listen(self, handle: Callable[[In], None]) -> None:
        """Hands every message but heartbeats to `handle`, one by one. Raises PeerLost when the
        stream ends."""
        try:
            async for arrived in self._incoming:
                self._received = True
                for message in parts(arrived):
                    if message.WhichOneof("message") != "heartbeat":
                        handle(message)
        except Unavailable as error:
            raise PeerLost(error.message) from None
        raise PeerLost("the other side of the hand-over left")

    async def beat(self) -> None:
        """Sends heartbeats into silence of ours; raises PeerLost on silence of the peer.

        Silence is counted in our own turns, so that a stall of this process is not taken for one of
        the peer: what arrived meanwhile is received before the next turn.
        """
        silent = 0
        while True:
            await asyncio.sleep(self._liveness.heartbeat_s)
            silent = 0 if self._received else silent + 1
            if silent >= self._liveness.missed:
                raise PeerLost("the other side of the hand-over fell silent")
            # A frozen peer can block writes for ever; counting its silence must go on.
            if not (self._sent or self._writes or self._outbox):
                await self.send(self._heartbeat)
            self._sent = self._received = False

    def _begin(self) -> None:
        """Begins to write all that waits."""
        waiting, self._outbox = self._outbox, []
        self._filled.clear()
        self._sent = True
        write = asyncio.create_task(self._write([joined(waiting)] if self.joins else waiting))
        self._writes.add(write)
        write.add_done_callback(self._written)

    def _written(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled():
            # Taken from each, so that none is reported as one that nobody looked at.
            error = write.exception()
            self._broken = self._broken or error
        if self._broken is not None:
            # `deliver` raises it.
            self._filled.set()

    async def _write(self, messages: Sequence[Out]) -> None:
        async with self._turn:
            try:
                for message in messages:
                    await self._send(message)
            except Unavailable as error:
                raise PeerLost(error.message) from None


class StateTimeout:
    """Watches that no state of a side lasts longer than its limit."""

    def __init__(self, limits: Mapping[State, StateLimit], state: Callable[[], State]) -> None:
        self._limits, self._state = limits, state
        self.restart()

    def restart(self) -> None:
        """The hand-over made progress: its state's time starts again."""
        self._since = asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Raises TransferAborted, up to a second late, when a state has outlasted its limit."""
        while True:
            limit = self._limits.get(self._state(), _NO_LIMIT)
            left = self._since + limit.seconds - asyncio.get_running_loop().time()
            if left <= 0:
                error = DeadlineExceeded(f"the hand-over waited too long for {limit.owner}")
                raise TransferAborted(HandoverEvent.DEADLINE, error)
            await asyncio.sleep(min(left, 1.0))


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
