"""A long-lived stream to one worker that all requests of this router share.

In: messages of an outbox, a clock of awake time.
Out: every message that comes, and what is lost when the worker is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import grpc

from baton.core.errors import BatonError, WorkerLost
from baton.rpc.calls import StepLimit, abandon, cancelled_here
from baton.rpc.loop import Clock


class Broadcast:
    """Wakes all tasks that wait for something to change.

    Check the condition, then wait: nothing is missed, for `set` runs on the same loop and there is
    no await in between. While no task waits, `set` costs next to nothing: it is called for every
    token.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def set(self) -> None:
        """Wakes all tasks that wait now."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for pending_attempt in waiting:
                if not pending_attempt.done():
                    pending_attempt.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns after the next `set`, or after timeout_s."""
        if timeout_s is None:
            await self._next()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._next()
        except TimeoutError:
            pass

    async def _next(self) -> None:
        pending_attempt = asyncio.get_running_loop().create_future()
        self._waiting[pending_attempt] = None
        try:
            await pending_attempt
        finally:
            self._waiting.pop(pending_attempt, None)


SILENCE_S = 2.0
"""No message at all for this long means dead: workers send a sign of life every 500 ms."""

MAX_REFUSALS = 3
FIRST_PAUSE_S = 0.03
LONGEST_PAUSE_S = 1.0


class ReconnectPolicy:
    """When a stream that broke counts as lost, and how long to pause before the next try.

    It is lost when its worker was silent for SILENCE_S of awake time (see `AwakeClock`), or when
    the worker's address refused several tries in a row: then no process listens there, and waiting
    is no use.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock()
        self._failures = 0
        self._given_up = False

    def alive(self) -> None:
        """A message came."""
        self._since = self._clock()
        self._failures = 0
        self._given_up = False

    def failed(self) -> None:
        """The stream broke, or could not be opened."""
        self._failures += 1

    def give_up(self) -> None:
        """Waiting any longer is no use: the worker hangs, or another one answers in its place."""
        self._given_up = True

    @property
    def spent(self) -> bool:
        """Whether what hung on the stream is lost."""
        return (
            self._given_up
            or self._failures > MAX_REFUSALS
            or self._clock() - self._since >= SILENCE_S
        )

    @property
    def pause_s(self) -> float:
        """Grows with each failure; jittered, so that routers do not come back all at once."""
        pause = FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)
        return float(min(pause, LONGEST_PAUSE_S) * random.uniform(0.7, 1.3))


Up = TypeVar("Up")
Down = TypeVar("Down")

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10.0
"""A worker that sends but does not read for so long is no use."""

BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError)
"""What grpc.aio raises when a call is over, and what silence raises."""


class WorkerStalled(Exception):
    """The worker answers, but its running step is far older than predicted."""


class SharedStream(ABC, Generic[Up, Down]):
    """The stream lives as long as the worker's instance id; `run` is cancelled when that is gone.

    It is opened, takes what waits in the outbox, gives every message to `incoming`, and is opened
    again when it breaks. Its reader never waits for a request. Subclasses give messages a meaning.
    """

    resumable = False
    """Whether the worker keeps what hung on a broken stream until a new one comes."""

    def __init__(self, changed: Broadcast, awake: Clock) -> None:
        """changed: set when `ready` changes. awake: measures the worker's silence."""
        self.ready = False
        """The stream is open, and new work may be put on it."""
        self._changed = changed
        self._awake = awake
        self._waiting = asyncio.Event()

    async def run(self) -> None:
        """Keeps the stream open. On the way out everything that hangs on it is lost."""
        grace = ReconnectPolicy(self._awake)
        try:
            while True:
                try:
                    await self._once(grace)
                except BROKEN as error:
                    log.debug("stream broke: %r", error)
                except asyncio.CancelledError:
                    if cancelled_here():
                        raise
                except WorkerStalled:
                    log.warning("a worker's step hangs: its stream is given up")
                    grace.give_up()
                except Exception:
                    # Whatever a worker said, the stream to it is opened again.
                    log.exception("a worker's stream is given up")
                    grace.give_up()
                if cancelled_here():
                    # Where a call is just being begun, grpc.aio takes the cancellation for the
                    # call's alone, and what is raised is whatever became of that.
                    raise asyncio.CancelledError
                grace.failed()
                if grace.spent or not self.resumable:
                    self.lose(WorkerLost("A worker of this request was lost."))
                await asyncio.sleep(grace.pause_s)
        finally:
            self.lose(WorkerLost("A worker of this request was lost."))

    def wake(self) -> None:
        """Call it when something is put into the outbox."""
        self._waiting.set()

    @abstractmethod
    def connect(self) -> grpc.aio.StreamStreamCall[Up, Down]:
        """Starts a new call."""

    @abstractmethod
    def greeting(self) -> Sequence[Up]:
        """The first messages of every new call."""

    @abstractmethod
    def outgoing(self) -> Sequence[Up]:
        """Takes everything out of the outbox."""

    @abstractmethod
    def incoming(self, message: Down) -> None:
        """Takes a message. WorkerStalled, or any other exception, gives the stream up."""

    @abstractmethod
    def lose(self, error: BatonError) -> None:
        """Fails all users of the stream and forgets them."""

    async def _once(self, grace: ReconnectPolicy) -> None:
        call = self.connect()
        writer: asyncio.Task[None] | None = None
        try:
            async with StepLimit(SILENCE_S, self._awake) as silence:
                for message in self.greeting():
                    await silence.watch(call.write(message))
                while True:
                    answer: Any = await silence.watch(call.read())
                    if answer is grpc.aio.EOF:
                        return
                    self.incoming(answer)
                    grace.alive()
                    if writer is None:
                        # Not before the worker has answered: until then it may be another
                        # instance id.
                        writer = asyncio.create_task(self._write(call))
                        writer.add_done_callback(lambda task: _end_with(task, call))
                        self._set_ready(True)
        finally:
            self._set_ready(False)
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await abandon(call)

    async def _write(self, call: grpc.aio.StreamStreamCall[Up, Down]) -> None:
        """Until the call breaks."""
        self._waiting.set()
        async with StepLimit(WRITE_TIMEOUT_S, self._awake) as stall:
            while True:
                await self._waiting.wait()
                self._waiting.clear()
                for message in self.outgoing():
                    await stall.watch(call.write(message))

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._changed.set()


def _end_with(writer: asyncio.Task[None], call: grpc.aio.Call) -> None:
    """A stream that nobody writes to any more must not look alive."""
    call.cancel()
    error = None if writer.cancelled() else writer.exception()
    if error is not None and not isinstance(error, BROKEN):
        log.error("writing to a worker failed", exc_info=error)
