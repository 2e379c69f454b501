"""A long-lived stream to one worker that all requests of this router share.

Opens it, writes what waits in an outbox, gives every message to `incoming`, and opens it again when
it breaks. Whoever reads here never waits for a request. What the messages mean is the subclass's
business.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import grpc

from baton.core.errors import BatonError, WorkerLost
from baton.router.workers.broadcast import Broadcast
from baton.router.workers.reconnect_policy import SILENCE_S, ReconnectPolicy
from baton.rpc.awake import Clock
from baton.rpc.calls import StepLimit, abandon, cancelled_here

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
