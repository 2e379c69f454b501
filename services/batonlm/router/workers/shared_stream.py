"""A long-lived stream to one worker, shared by all requests of this router.

In: messages of an outbox, a clock of awake time. Out: all incoming messages, and the users' failure
when the worker is lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import grpc

from batonlm.core.errors import BatonError, WorkerLost
from batonlm.rpc.calls import StepLimit, abandon, cancelled_here
from batonlm.rpc.loop import Clock


class Broadcast:
    """Wakes all tasks that wait for a change.

    Check the condition, then wait. No change is missed, because `set` runs on the same loop and
    there is no await in between. Without waiting tasks `set` costs almost nothing, because it is
    called for every token.
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
"""Seconds without any message after which a worker counts as dead; workers send a heartbeat every
500 ms."""

MAX_REFUSALS = 3
FIRST_PAUSE_S = 0.03
LONGEST_PAUSE_S = 1.0


class ReconnectPolicy:
    """When a broken stream counts as lost, and the pause before the next try.

    It is lost when its worker was silent for SILENCE_S of awake time (see `AwakeClock`), or when
    the worker's address refused several connections in a row, which means that no process listens
    there.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock()
        self._failures = 0
        self._given_up = False

    def alive(self) -> None:
        """A message arrived."""
        self._since = self._clock()
        self._failures = 0
        self._given_up = False

    def failed(self) -> None:
        """The stream broke, or could not be opened."""
        self._failures += 1

    def give_up(self) -> None:
        """Counts the stream as lost at once: the worker hangs, or another one answers in its
        place."""
        self._given_up = True

    @property
    def spent(self) -> bool:
        """Whether the users of the stream are to be failed."""
        return (
            self._given_up
            or self._failures > MAX_REFUSALS
            or self._clock() - self._since >= SILENCE_S
        )

    @property
    def pause_s(self) -> float:
        """Grows with each failure; jittered, so that routers do not reconnect all at once."""
        pause = FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)
        return float(min(pause, LONGEST_PAUSE_S) * random.uniform(0.7, 1.3))


Up = TypeVar("Up")
Down = TypeVar("Down")

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 10.0
"""Seconds after which a worker that sends but does not read is given up."""

BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError)
"""The exceptions of grpc.aio for an ended call, and that of silence."""


class WorkerStalled(Exception):
    """The worker answers, but its running step is far older than predicted."""


class SharedStream(ABC, Generic[Up, Down]):
    """A stream that lives as long as the worker's instance id; `run` is cancelled when that is
    gone.

    It is opened, sends what is in the outbox, passes every message to `incoming`, and is reopened
    when it breaks. Its reader never waits for a request. Subclasses define the messages.
    """

    resumable = False
    """Whether the worker keeps the state of a broken stream until a new one is opened."""

    def __init__(self, changed: Broadcast, awake: Clock) -> None:
        """changed: set when `ready` changes. awake: measures the worker's silence."""
        self.ready = False
        """Whether the stream is open and accepts new work."""
        self._changed = changed
        self._awake = awake
        self._waiting = asyncio.Event()

    async def run(self) -> None:
        """Keeps the stream open. On exit all its users fail."""
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
                    # After any message from the worker, the stream is reopened.
                    log.exception("a worker's stream is given up")
                    grace.give_up()
                if cancelled_here():
                    # If a call is just starting, grpc.aio attributes the cancellation to the call,
                    # and a different exception may be raised.
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
        """Returns the first messages of every new call."""

    @abstractmethod
    def outgoing(self) -> Sequence[Up]:
        """Takes everything out of the outbox."""

    @abstractmethod
    def incoming(self, message: Down) -> None:
        """Processes a message. WorkerStalled, or any other exception, closes the stream."""

    @abstractmethod
    def lose(self, error: BatonError) -> None:
        """Fails all users of the stream and drops them."""

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
                        # Only after the worker has answered: until then it may be another instance
                        # id.
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
        """Runs until the call breaks."""
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
    """Cancels a call whose writer has ended, so that it does not look alive."""
    call.cancel()
    error = None if writer.cancelled() else writer.exception()
    if error is not None and not isinstance(error, BROKEN):
        log.error("writing to a worker failed", exc_info=error)
