"""The queue of work for the workers of one pool, in fair order, with its retries.

It is for work that any worker of the pool can do and that leaves nothing there: what tokenizers
encode and decode, and what encode workers compute.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from batonlm.core.admission.fair_queue import Entry, FairQueue
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, DeadlineExceeded
from batonlm.core.observe.stages import UNTRACED, TraceContext
from batonlm.core.request.request_state import VERDICTS, FailureAction
from batonlm.core.routing.failures import RetryBudget
from batonlm.core.routing.routing import tie_break
from batonlm.router.config import RouterConfig
from batonlm.router.workers.fleet import C, Placed, Pool, Worker
from batonlm.router.workers.shared_stream import Broadcast
from batonlm.rpc.logs import named

log = logging.getLogger(__name__)

LONG_BYTES = 1 << 16
"""Inputs from this many bytes on are long, as for the tokenizer itself."""

SHORT_BYTES_PER_THREAD = 1 << 15
"""Bytes of short inputs that a worker gets at a time, per thread: one batch in progress and the
next one."""

SHORT_INPUTS_PER_THREAD = 128
"""The same, as a number of inputs, for the smallest ones."""

MAX_GRAMMARS = 2
"""Grammars that one tokenizer gets at a time: as many as it compiles at a time by default."""

THREADS = 2
"""Assumed threads of a worker that does not report them: the fewest that one has."""

INPUT_BYTES = 256
"""The cost of each input, in addition to its own bytes."""

GRAMMAR_BYTES = 1 << 16
"""The cost of a grammar, in addition to these."""

QUANTUM_BYTES = 4096.0
LOOK_AGAIN_S = 0.5
"""Seconds between two looks at deadlines, which pass without any event. A change among workers
is noticed at once."""


PAUSE_S = 0.1
"""Seconds before work goes to another worker when one has no room."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AskedBy:
    """The request for which work is done."""

    request_id: str
    tenant: Tenant
    deadline: float
    """On the running loop's clock."""
    trace: TraceContext = UNTRACED
    """The trace context of the work."""


class Lane(Enum):
    """Lanes of the queue, which do not wait for each other."""

    SHORT = "short"
    LONG = "long"
    GRAMMAR = "grammar"


@dataclass(slots=True, eq=False)
class QueuedWork(Generic[C]):
    """An input that waits for a worker."""

    request_id: str
    tenant: Tenant
    lane: Lane
    size: int
    """In bytes."""
    digest: str
    """Of what the worker must have; see `WorkQueue`."""
    passed_over: Collection[str]
    """Instance ids that are used only when there is no other."""
    give_up: float
    """Until when a worker may be missing, on the loop's clock."""
    future: asyncio.Future[WorkerSlot[C]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True)
class _Sent:
    """What one worker has of this router's inputs."""

    inputs: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    short_bytes: int = 0

    def has_room(self, lane: Lane, size: int, threads: int) -> bool:
        inputs = self.inputs[lane]
        match lane:
            case Lane.SHORT:
                fits = self.short_bytes + size <= SHORT_BYTES_PER_THREAD * threads
                return not inputs or (fits and inputs < SHORT_INPUTS_PER_THREAD * threads)
            case Lane.LONG:
                # A worker keeps a thread for short inputs.
                return inputs < max(1, threads - 1)
            case Lane.GRAMMAR:
                return inputs < MAX_GRAMMARS


class WorkerSlot(Generic[C]):
    """A worker, with room reserved there until `release`, which is idempotent."""

    def __init__(self, queue: WorkQueue[C], worker: Worker[C], lane: Lane, size: int) -> None:
        self.worker = worker
        self._queue = queue
        self._lane = lane
        self._size = size
        self._placed: Placed | None = worker.place(1)
        queue._sent_one(worker, lane, size, 1)

    def release(self) -> None:
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.release()
            self._queue._sent_one(self.worker, self._lane, self._size, -1)
            self._queue._dispatch()

    def __enter__(self) -> WorkerSlot[C]:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WorkQueue(Generic[C]):
    """The queue of inputs for the workers of a pool, in fair order. One per pool and router.

    A worker processes inputs in order of arrival, so the order is determined here: a router sends
    each one only as much as keeps its threads busy, and the rest waits, by deficit round robin over
    tenants and bytes (`FairQueue`). As at the tokenizer there are three lanes, so that none waits
    for another: short inputs, long ones, and those with a grammar, which is compiled first and may
    take far longer than the text.
    """

    def __init__(
        self,
        pool: Pool[C],
        changed: Broadcast,
        config: RouterConfig,
        budget: RetryBudget,
        *,
        fits: Callable[[Worker[C], str], bool],
    ) -> None:
        """changed: set when there may be other workers, or other states of them. fits: whether a
        worker has what a digest stands for."""
        self._pool = pool
        self._changed = changed
        self._config = config
        self._budget = budget
        self._fits = fits
        # Admission bounds these queues: waiting inputs hold their bytes there.
        self._queues: dict[Lane, FairQueue[QueuedWork[C]]] = {
            lane: FairQueue(max_tokens=sys.maxsize, max_entries=sys.maxsize, quantum=QUANTUM_BYTES)
            for lane in Lane
        }
        self._sent: dict[str, _Sent] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def num_sent(self) -> int:
        """Inputs of this router that workers have."""
        return sum(sum(sent.inputs.values()) for sent in self._sent.values())

    async def run(
        self,
        digest: str,
        asked_by: AskedBy,
        lane: Lane,
        size: int,
        work: Callable[[C], Callable[[str, float, TraceContext], Awaitable[T]]],
        on_turn: Callable[[], None] = lambda: None,
    ) -> tuple[T, Worker[C]]:
        """Returns the result of `work` on a worker that fits the digest, and that worker; when one
        fails, on another one. work: takes a client and returns a function of the request's id, the
        seconds left, and its trace. on_turn: called each time that it is sent. Raises BatonError,
        at once where it names an input that is invalid."""
        loop = asyncio.get_running_loop()
        passed_over: set[str] = set()
        failures = 0
        while True:
            wanted = QueuedWork[C](
                asked_by.request_id,
                asked_by.tenant,
                lane,
                size,
                digest,
                passed_over,
                give_up=loop.time() + self._config.wait_timeout_s,
            )
            try:
                slot = await self.turn(wanted, asked_by.deadline)
            except TimeoutError:
                raise DeadlineExceeded("The request ran out of time.") from None
            worker = slot.worker
            try:
                with slot:
                    on_turn()
                    left_s = asked_by.deadline - loop.time()
                    done = await work(worker.client)(asked_by.request_id, left_s, asked_by.trace)
                worker.success()
                return done, worker
            except BatonError as error:
                worker.failure(error)
                verdict = VERDICTS[error.reason]
                failures += verdict is FailureAction.ELSEWHERE
                if verdict is FailureAction.FATAL or failures >= self._config.max_attempts:
                    raise
                if verdict is FailureAction.ELSEWHERE and not self._budget.take(loop.time()):
                    raise
                lost = {"lost_at": self._pool.role, "reason": error.reason.name}
                about = {**named(asked_by.request_id, asked_by.trace.trace_id), **lost}
                log.info("a worker failed: %s", error.message, extra=about)
                passed_over.add(worker.identity.instance_id)
                if verdict is FailureAction.LATER:
                    await asyncio.sleep(error.retry_after_s or PAUSE_S)

    async def turn(self, wanted: QueuedWork[C], deadline: float) -> WorkerSlot[C]:
        """Returns a worker with room, which the caller releases. deadline: on the running loop's
        clock; within a tenant the earliest goes first. Raises Unavailable when there is no
        worker for too long, TimeoutError at the deadline."""
        entry = Entry(
            wanted,
            wanted.tenant.sharer,
            wanted.tenant.weight,
            0,
            wanted.size + INPUT_BYTES + GRAMMAR_BYTES * (wanted.lane is Lane.GRAMMAR),
            asyncio.get_running_loop().time(),
            deadline,
            group=wanted.digest,
        )
        queue = self._queues[wanted.lane]
        queue.add(entry)
        self._dispatch()
        if not wanted.future.done() and self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())
        try:
            async with asyncio.timeout_at(deadline):
                return await wanted.future
        except BaseException:
            # Inputs that were served or failed have left the queue.
            if not wanted.future.done() or wanted.future.cancelled():
                queue.remove(entry, served=False)
                self._dispatch()
            elif wanted.future.exception() is None:
                wanted.future.result().release()
            raise

    async def close(self) -> None:
        """Stops the queue. Waiting inputs are ended by their own requests."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _keep_looking(self) -> None:
        try:
            while self.num_waiting:
                await self._changed.wait(LOOK_AGAIN_S)
                self._dispatch()
        finally:
            self._looking = None

    def _dispatch(self) -> None:
        """Assigns workers in order, as far as there is room."""
        if not self.num_waiting:
            return
        now = asyncio.get_running_loop().time()
        usable = self._pool.usable(now)
        for queue in self._queues.values():
            while self._serve_one(queue, usable):
                pass
            self._give_up(queue, usable, now)

    def _serve_one(self, queue: FairQueue[QueuedWork[C]], usable: list[Worker[C]]) -> bool:
        """Serves one input; returns whether one left the queue."""
        full: set[str] = set()
        for entry in queue.heads():
            wanted = entry.item
            if wanted.future.done() or wanted.digest in full:
                # A cancelled input removes itself and triggers the next turn. An input never
                # overtakes an earlier one that needs the same workers.
                continue
            fitting = [w for w in usable if self._fits(w, wanted.digest)]
            worker = self._pick(fitting, wanted)
            if worker is None:
                full.add(wanted.digest)
                continue
            queue.remove(entry, served=True)
            wanted.future.set_result(WorkerSlot(self, worker, wanted.lane, wanted.size))
            return True
        return False

    def _give_up(
        self, queue: FairQueue[QueuedWork[C]], usable: list[Worker[C]], now: float
    ) -> None:
        """Fails inputs whose workers have been missing for too long."""
        digests = {entry.item.digest for entry in queue.heads()}
        absent = {one for one in digests if not any(self._fits(worker, one) for worker in usable)}
        for entry in list(queue) if absent else ():
            wanted = entry.item
            late = now >= wanted.give_up or not self._pool.awaited
            if late and not wanted.future.done() and wanted.digest in absent:
                queue.remove(entry, served=False)
                wanted.future.set_exception(self._pool.absent())

    def _pick(self, fitting: list[Worker[C]], wanted: QueuedWork[C]) -> Worker[C] | None:
        """Returns the worker with room and the fewest running calls of this router. One that is
        passed over is used only when there is no other, busy or not."""
        fresh = [w for w in fitting if w.identity.instance_id not in wanted.passed_over]
        return min(
            (worker for worker in fresh or fitting if self._has_room(worker, wanted)),
            key=lambda worker: (
                worker.placed_sequences,
                tie_break(wanted.request_id, worker.identity),
            ),
            default=None,
        )

    def _has_room(self, worker: Worker[C], wanted: QueuedWork[C]) -> bool:
        sent = self._sent.get(worker.identity.instance_id)
        threads = worker.description.max_sequences or THREADS
        return sent is None or sent.has_room(wanted.lane, wanted.size, threads)

    def _sent_one(self, worker: Worker[C], lane: Lane, size: int, one: int) -> None:
        sent = self._sent.setdefault(worker.identity.instance_id, _Sent())
        sent.inputs[lane] += one
        if lane is Lane.SHORT:
            sent.short_bytes += one * size
        if not any(sent.inputs.values()):
            del self._sent[worker.identity.instance_id]
