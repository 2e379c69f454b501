"""A long-lived stream to one worker that all requests of this router share.

Opens it, writes what waits in an outbox, gives every message to `incoming`, and opens it again when
it breaks. Whoever reads here never waits for a request. What the messages mean is the subclass's
business.
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

# Wakes everyone who waits for something to change.


class Broadcast:
    """A broadcast. Check the condition, then wait: nothing is missed, for `set` runs on the same
    loop and there is no await in between. Without anyone who waits, `set` costs nothing: streams
    are told of every token.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def set(self) -> None:
        """Wakes all current pending attempts."""
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


# When a stream that broke counts as lost, and how long to pause before the next try.
#
# A stream is lost when its worker was silent for the window, or when the worker's address refused
# several tries in a row: then nobody listens there and waiting is no use.


SILENCE_S = 2.0
"""No message at all for this long means dead: workers send a sign of life every 500 ms."""

MAX_REFUSALS = 3
FIRST_PAUSE_S = 0.03
LONGEST_PAUSE_S = 1.0


class ReconnectPolicy:
    """The patience with one worker's stream. clock: see `AwakeClock`."""

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
        """No use in waiting any longer: the worker hangs, or another one answers in its place."""
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
"""How grpc.aio tells that a call is over, and silence."""


class WorkerStalled(Exception):
    """The worker answers, but its running step is far older than predicted."""


class SharedStream(ABC, Generic[Up, Down]):
    """Lives as long as the worker's instance id does; `run` is cancelled when that is gone.

    ready: the stream stands and new work may be put on it; `changed` is set when that changes.
    awake: what the worker's silence is measured with.
    """

    resumable = False
    """Whether the worker keeps what hung on a broken stream until a new one comes."""

    def __init__(self, changed: Broadcast, awake: Clock) -> None:
        self.ready = False
        self._changed = changed
        self._awake = awake
        self._waiting = asyncio.Event()

    async def run(self) -> None:
        """Keeps the stream open. On the way out everyone who uses it is told that it is lost."""
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
        """There is something in the outbox."""
        self._waiting.set()

    @abstractmethod
    def connect(self) -> grpc.aio.StreamStreamCall[Up, Down]:
        """Starts a new call."""

    @abstractmethod
    def greeting(self) -> Sequence[Up]:
        """What is said first on every new call."""

    @abstractmethod
    def outgoing(self) -> Sequence[Up]:
        """Takes everything out of the outbox."""

    @abstractmethod
    def incoming(self, message: Down) -> None:
        """A message came. WorkerStalled, or any other exception, gives the stream up."""

    @abstractmethod
    def lose(self, error: BatonError) -> None:
        """Everything that hung on the stream is lost: tell its users and forget them."""

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
