"""Dispatcher: the queue in which attempts wait for workers, in fair order.

An attempt gets workers when it is its turn in the FairQueue, the router's ConcurrencyLimiter has
room, and matching workers are not full. Its load on them until its first token is an AttemptLoad,
so that the next attempt accounts for it before a worker reports it.

An attempt whose wait is, or is predicted to be, too long is refused early, except while workers are
missing that may come back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from batonlm.core.admission.concurrency_limiter import ConcurrencyLimiter
from batonlm.core.admission.fair_queue import DrainRate, Entry, FairQueue
from batonlm.core.admission.tenant_budgets import Limit, Refusal
from batonlm.core.errors import BatonError, Overloaded
from batonlm.core.request.attempt import Phase
from batonlm.core.routing.failures import Quarantine
from batonlm.core.routing.load import WorkerLedger
from batonlm.core.routing.rebalance import Newcomer
from batonlm.core.routing.routing import Decision
from batonlm.router.workers.clients import PrefillClient
from batonlm.router.workers.decode_session import DecodeSession
from batonlm.router.workers.fleet import Fleet, Placed, Worker

REFRESH_S = 0.005


class FleetLedger:
    """The load that this router placed on each worker."""

    def __init__(self, fleet: Fleet) -> None:
        """`full` has the instance ids of workers that should get nothing more now."""
        self.full: set[str] = set()
        self._fleet = fleet
        self._books: dict[str, WorkerLedger] = {}
        self._refreshed_at = float("-inf")

    @property
    def held(self) -> dict[str, int]:
        """What attempts without a first token hold on all workers, by kind."""
        books = list(self._books.values())
        return {
            "computing_tokens": sum(one.computing for one in books),
            "kv_positions": sum(one.kv for one in books),
        }

    def refresh(self, now: float) -> None:
        """Takes the newest reports, unless that was done a moment ago."""
        if now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        live: set[str] = set()
        for pool in (self._fleet.prefills, self._fleet.decodes):
            for worker in pool.workers():
                live.add(worker.identity.instance_id)
                self.update(worker)
        self.full &= live
        for gone in [i for i, b in self._books.items() if i not in live and b.is_empty]:
            del self._books[gone]

    def update(self, worker: Worker[Any]) -> None:
        """Recomputes whether the worker is full."""
        places = worker.description.max_sequences if worker.identity.role == "decode" else 0
        if self._read(worker).is_full(worker.placed_sequences, places):
            self.full.add(worker.identity.instance_id)
        else:
            self.full.discard(worker.identity.instance_id)

    def take(self, place: Placement, input_tokens: int, choices: int) -> Callable[[], None]:
        """Counts an attempt's input on its workers. Returns a function that undoes it."""
        computes = place.prefill or place.decode
        assert computes is not None
        computing = self._book(computes.identity.instance_id)
        holding = None if place.decode is None else self._book(place.decode.identity.instance_id)
        computing.computing += input_tokens
        positions = 0
        if holding is not None and place.decode is not None:
            positions = place.decode.description.positions_taken(input_tokens, choices)
            holding.kv += positions

        def undo() -> None:
            computing.computing -= input_tokens
            if holding is not None:
                holding.kv -= positions

        return undo

    def has_kv(self, worker: Worker[Any], positions: int) -> bool:
        """Whether a decode worker has free blocks for this many more positions. An idle worker
        accepts anything that fits it at all."""
        books = self._read(worker)
        block_size = worker.description.block_size
        return books.has_kv(worker.placed_sequences, block_size, positions)

    def _book(self, instance_id: str) -> WorkerLedger:
        return self._books.setdefault(instance_id, WorkerLedger())

    def _read(self, worker: Worker[Any]) -> WorkerLedger:
        books = self._book(worker.identity.instance_id)
        books.read(worker.load, worker.placed_sequences)
        return books


@dataclass(slots=True)
class Placement:
    """Live workers for an attempt, with the decision that chose them. The code that receives it
    releases it."""

    prefill: Worker[PrefillClient] | None
    decode: Worker[DecodeSession] | None
    decision: Decision
    claim: AttemptLoad | None = None
    """The load on the workers until the first token."""
    held: ExitStack = field(default_factory=ExitStack)
    quarantine: Quarantine | None = None
    """Set for a suspect."""
    apart: ExitStack = field(default_factory=ExitStack)
    """Keeps other suspects off these workers until this one is cleared."""
    computing: Placed | None = None

    @property
    def instance_ids(self) -> frozenset[str]:
        return frozenset(
            worker.identity.instance_id for worker in (self.prefill, self.decode) if worker
        )

    @property
    def phases(self) -> frozenset[Phase]:
        phases = {Phase.PREFILL: self.prefill, Phase.DECODE: self.decode}
        return frozenset(phase for phase, worker in phases.items() if worker is not None)

    def hold(self, sequences: int, tokens: int) -> None:
        """Counts the attempt as placed on its workers until `release`, and its uncached tokens
        where they are computed until `prefilled`. tokens: of its input."""
        uncached = self.decision.uncached_tokens
        if self.prefill is not None:
            self.computing = self.prefill.place(sequences, uncached, tokens)
            self.held.enter_context(self.computing)
        if self.decode is not None:
            here = self.decode.place(sequences, 0 if self.prefill else uncached, tokens)
            self.held.enter_context(here)
            self.computing = self.computing or here
        if self.quarantine is not None:
            # This must happen now: the next attempt may be placed before this one runs.
            self.apart.enter_context(self.quarantine.entered(self.instance_ids))

    def prefilled(self) -> None:
        """The input is computed, or never will be."""
        if self.computing is None:
            return
        if self.prefill is not None:
            self.computing.release()
        else:
            self.computing.computed()

    def answered(self, queue_s: float = 0.0, compute_s: float = 0.0) -> None:
        """See `AttemptLoad.answered`."""
        if self.claim is not None:
            self.claim.answered(queue_s, compute_s)

    def release(self) -> None:
        self.held.close()
        self.apart.close()
        if self.claim is not None:
            self.claim.release()


LOOK_AGAIN_S = 0.05
SWEEP_S = 0.1
PATIENCE = 2.0
"""A queued attempt waits at most this multiple of the allowed wait, in case the queue drains more
slowly than predicted. It is as large as the error of a prediction: with a smaller factor some
admitted attempts would wait in vain."""


class Blocked(Enum):
    """Why an attempt has no place now."""

    BUSY = "the workers are busy"
    ABSENT = "there is no such worker"
    ITSELF = "it passes over the workers there are"


class WorkerClass(NamedTuple):
    """Identifies attempts that the same workers suit."""

    model: str
    needs_decode: bool
    """Prefill alone is not enough."""
    short: bool
    """Decode prefills it while prefill is busy."""
    adapter: str = ""
    """The digest of its LoRA adapter, unless all workers of the model have it."""


@dataclass(slots=True, eq=False)
class PendingAttempt:
    """An attempt that waits for workers."""

    find: Callable[[frozenset[str]], Placement | Blocked]
    """Returns workers for it outside the given full ones. Does not block."""
    over: Callable[[], bool]
    """Whether it has ended meanwhile."""
    kind: WorkerClass
    """Equal for all attempts that need the same workers."""
    input_tokens: int
    choices: int
    give_up: float
    """The time at which it stops waiting in any case, on the loop's clock."""
    future: asyncio.Future[Placement | Blocked | None]
    blocked: Blocked | None = field(default=None)
    waited: bool = False
    """Whether it had to wait at all."""

    @property
    def gone(self) -> bool:
        """Whether it needs no workers any more. A cancelled attempt is gone at once, although its
        task removes it from the queue only when it runs again, possibly after the next places were
        assigned."""
        return self.future.cancelled() or self.over()


class AttemptLoad:
    """An attempt's load on its workers until its first token. `release` is idempotent; the last
    call comes when its sequences have left the workers."""

    __slots__ = ("_began", "_dispatcher", "_tokens", "_undo", "_workers")

    def __init__(
        self, dispatcher: Dispatcher, place: Placement, pending_attempt: PendingAttempt
    ) -> None:
        self._dispatcher = dispatcher
        self._tokens = pending_attempt.input_tokens
        self._workers = [w for w in (place.prefill, place.decode) if w is not None]
        taken = dispatcher.occupancy.take(
            place, pending_attempt.input_tokens, pending_attempt.choices
        )
        self._undo: Callable[[], None] | None = taken
        self._began = dispatcher.now()
        dispatcher.window.take(self._tokens)
        self._update()

    def answered(self, queue_s: float = 0.0, compute_s: float = 0.0) -> None:
        """The first token or all KV has arrived. queue_s: seconds that the input waited at its
        worker; compute_s: seconds that it then took."""
        if self._undo is not None:
            now, window = self._dispatcher.now(), self._dispatcher.window
            window.answered(self._tokens, now - self._began)
            window.queued(queue_s, compute_s, now)
            self.release()

    def release(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
            self._dispatcher.window.give_back(self._tokens)
        self._update()
        self._dispatcher.turn_soon()

    def _update(self) -> None:
        for worker in self._workers:
            self._dispatcher.occupancy.update(worker)


class Dispatcher:
    """Assigns workers to the waiting attempts of one router."""

    def __init__(
        self,
        fleet: Fleet,
        queue: FairQueue[PendingAttempt],
        drain: DrainRate,
        window: ConcurrencyLimiter,
        *,
        max_queue_s: float,
        retry_after_s: Callable[[float], float],
    ) -> None:
        """max_queue_s: see RouterConfig. retry_after_s: returns when a refused client should retry,
        from the seconds that the queue takes."""
        self.window = window
        self._fleet = fleet
        self._queue = queue
        self._drain = drain
        self._max_queue_s = max_queue_s
        self._retry_after_s = retry_after_s
        self.occupancy = FleetLedger(fleet)
        self._without_kv: tuple[PendingAttempt, Worker[DecodeSession]] | None = None
        self._present_since = float("-inf")
        self._swept_at = float("-inf")
        self.on_waiting: Callable[[], None] = lambda: None
        """Called when an attempt gets no workers at once."""
        self._turning: asyncio.Task[None] | None = None
        self._soon: asyncio.Handle | None = None

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def wait(self, entry: Entry[PendingAttempt]) -> Placement | Blocked | None:
        """Waits for a place, which the caller releases. Returns None when the attempt is over, and
        ITSELF when it is its turn and none of the workers suits it, so that it does not hold up
        others. Raises Refusal when there will be no place in time, Overloaded or Unavailable at
        give_up."""
        pending_attempt = entry.item
        self._queue.add(entry)
        try:
            self._turn()
            pending_attempt.waited = not pending_attempt.future.done()
            if pending_attempt.waited:
                self.on_waiting()
            if pending_attempt.waited and self._turning is None:
                self._turning = asyncio.create_task(self._keep_turning())
            return await pending_attempt.future
        except BaseException:
            if entry in self._queue:
                self._leave(entry, served=False, now=self.now())
            elif (
                not pending_attempt.future.cancelled()
                and pending_attempt.future.exception() is None
            ):
                # The attempt was served and then cancelled before its task ran.
                place = pending_attempt.future.result()
                if place is not None and not isinstance(place, Blocked):
                    place.release()
            raise

    @property
    def held(self) -> dict[str, int]:
        """The load on workers and the waiting attempts, by kind; each is 0 when no request runs."""
        return {
            "waiting": len(self._queue),
            "window_tokens": self.window.tokens,
            **self.occupancy.held,
        }

    @property
    def newcomer(self) -> Newcomer | None:
        """The first waiting attempt, if all that it lacks is memory for its KV."""
        if self._without_kv is None or self._without_kv[0].future.done():
            return None
        pending_attempt, worker = self._without_kv
        return Newcomer(
            worker.model.digest,
            pending_attempt.input_tokens,
            pending_attempt.choices,
            pending_attempt.kind.adapter,
        )

    def refused(self) -> None:
        """A worker refused an attempt that was placed here."""
        self.window.congested(self.now())

    def turn_soon(self) -> None:
        """Schedules a turn: there may be more room."""
        if self._soon is None and len(self._queue):
            self._soon = asyncio.get_running_loop().call_soon(self._turn)

    async def close(self) -> None:
        """Stops assigning places. Waiting attempts are ended by their own requests."""
        if self._soon is not None:
            self._soon.cancel()
        if self._turning is not None:
            self._turning.cancel()
            await asyncio.wait([self._turning])

    async def _keep_turning(self) -> None:
        try:
            while len(self._queue):
                await self._fleet.changed.wait(LOOK_AGAIN_S)
                self._turn()
        finally:
            self._turning = None

    def _turn(self) -> None:
        """Assigns places in order, as far as there is room."""
        self._soon = None
        self._without_kv = None
        now = self.now()
        self._sweep(now)
        self.occupancy.refresh(now)
        blocked: set[WorkerClass] = set()
        while (found := self._next(blocked)) is not None:
            self._end(*found, now)
        self._note_waiting(now)

    def _next(
        self, blocked: set[WorkerClass]
    ) -> tuple[Entry[PendingAttempt], Placement | Blocked | None] | None:
        """Returns the first attempt that stops waiting, and its place. An attempt never overtakes
        an earlier one that needs the same workers. A gone attempt gets no place, because its task
        would not return it."""
        for entry in self._queue.heads():
            pending_attempt = entry.item
            if pending_attempt.gone:
                return entry, None
            if pending_attempt.kind in blocked:
                continue
            found: Placement | Blocked = Blocked.BUSY
            if self.window.has_room(pending_attempt.input_tokens):
                found = pending_attempt.find(frozenset(self.occupancy.full))
            if not isinstance(found, Blocked) and not self._has_kv(pending_attempt, found):
                if self._without_kv is None and found.decode is not None:
                    self._without_kv = pending_attempt, found.decode
                found = Blocked.BUSY
            if found is Blocked.ITSELF:
                return entry, found
            if isinstance(found, Blocked):
                blocked.add(pending_attempt.kind)
                pending_attempt.blocked = found
                continue
            found.hold(pending_attempt.choices, pending_attempt.input_tokens)
            found.claim = AttemptLoad(self, found, pending_attempt)
            return entry, found
        return None

    def _has_kv(self, pending_attempt: PendingAttempt, place: Placement) -> bool:
        if place.decode is None:
            return True
        positions = place.decode.description.positions_taken(
            pending_attempt.input_tokens, pending_attempt.choices
        )
        return self.occupancy.has_kv(place.decode, positions)

    def _sweep(self, now: float) -> None:
        """Ends the waiting of attempts that are gone or would wait in vain."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        heads = self._queue.heads()
        if any(head.item.blocked is Blocked.ABSENT for head in heads):
            self._present_since = now
        for entry in list(self._queue):
            if entry.item.gone:
                self._end(entry, None, now)
            elif now >= entry.item.give_up:
                self._fail(entry, self._nowhere(entry.item, heads), now)
        # These were admitted and have waited already, so they are refused early only when it is
        # certain.
        late = self._queue.hopeless(self._drain.least_wait_s, self._latest, now)
        for entry in late:
            self._fail(entry, self._too_late(), now)

    def _latest(self, entry: Entry[PendingAttempt]) -> float:
        """Returns the latest time for a place. While workers are missing there is no prediction:
        the past drain rate does not say when they come back."""
        if self._present_since == self._swept_at:
            return math.inf
        patience = max(entry.arrived, self._present_since) + PATIENCE * self._max_queue_s
        return min(entry.deadline, patience)

    def _too_late(self) -> Refusal:
        retry_s = self._retry_after_s(self._drain.wait_s(self._queue.tokens))
        text = "It would have to wait for too long."
        return Refusal(text, retry_after_s=retry_s, limit=Limit.WAIT)

    def _nowhere(
        self, pending_attempt: PendingAttempt, heads: list[Entry[PendingAttempt]]
    ) -> BatonError:
        busy = pending_attempt.blocked or next(
            (head.item.blocked for head in heads if head.item.kind == pending_attempt.kind), None
        )
        if busy is Blocked.ABSENT:
            return self._fleet.decodes.absent(model=True)
        return Overloaded("All workers are busy.", retry_after_s=self._retry_after_s(1.0))

    def _note_waiting(self, now: float) -> None:
        # Resumed entries do not count: they come first and use none of the queue's bounds.
        bounded = self._queue.num_bounded
        self._drain.waiting(now, self._queue.tokens / bounded if bounded else None)

    def _end(
        self, entry: Entry[PendingAttempt], found: Placement | Blocked | None, now: float
    ) -> None:
        """Ends the waiting with a result, which the pending attempt then owns and releases."""
        self._leave(entry, served=found is not None and not isinstance(found, Blocked), now=now)
        if not entry.item.future.cancelled():
            entry.item.future.set_result(found)

    def _fail(self, entry: Entry[PendingAttempt], error: BatonError, now: float) -> None:
        self._leave(entry, served=False, now=now)
        entry.item.future.set_exception(error)

    def _leave(self, entry: Entry[PendingAttempt], *, served: bool, now: float) -> None:
        self._queue.remove(entry, served=served)
        if served and not entry.resumed and entry.item.waited:
            self._drain.left(entry.tokens, now)
        if not len(self._queue):
            self._note_waiting(now)
