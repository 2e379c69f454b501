"""The router: requests wait for workers in core's fair queue, with its limiter and policy.

As in the real router an attempt gets workers when it is first in the queue, the limiter allows it,
and workers have room; requests that wait too long are refused. The router uses only workers'
reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton_loadtest.simulator.prompts import Prompt
from baton_loadtest.simulator.queue import IDLE, EventQueue
from baton_loadtest.simulator.requests import Record
from baton_loadtest.simulator.settings import FleetFacts, WorkerFacts
from batonlm.core.admission.fair_queue import DrainRate, Entry, FairQueue
from batonlm.core.errors import BatonError, Reason
from batonlm.core.kvcache.cache_events import CacheBatch
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerLedger, WorkerLoad, WorkerSnapshot
from batonlm.core.routing.prefix_index import PrefixIndex
from batonlm.core.routing.routing import Decision, Demand, PoolSnapshot, decide


class Seen:
    """One worker as the router sees it: by its last report, plus what was placed there since.

    number: in its pool.
    """

    def __init__(self, pool: SeenPool, number: int) -> None:
        self.number = number
        self.identity = WorkerIdentity(pool.role, f"{pool.role[0]}{number:07d}", "")
        self.books = WorkerLedger()
        self._pool = pool
        self._index_number = pool.index.join()
        self.load: WorkerLoad | None = None
        self.is_gone = False
        self.placed_sequences = 0
        self._placed_tokens = 0
        self._fresh = [0, 0, 0]

    def gone(self) -> None:
        """Removes the worker: no request is placed there, and its prefixes are not found."""
        self.load = None
        self.is_gone = True
        self._pool.index.leave(self._index_number)
        self.changed()

    def report(self, load: WorkerLoad, batches: list[CacheBatch]) -> None:
        if self.is_gone:
            return
        self.load = load
        self._fresh = [0, 0, 0]
        for batch in batches:
            self._pool.index.apply(self._index_number, batch)
        self.changed()

    def place(self, tokens: int, positions: int) -> None:
        """Places a sequence with so many positions, of which `tokens` are to be prefilled."""
        self.placed_sequences += 1
        self._placed_tokens += tokens
        self._fresh = [self._fresh[0] + 1, self._fresh[1] + tokens, self._fresh[2] + positions]
        self.changed()

    def take_back(self, sequences: int, tokens: int) -> None:
        self.placed_sequences -= sequences
        self._placed_tokens -= tokens
        self.changed()

    def changed(self) -> None:
        """Marks the snapshot as stale, after a change that affects decisions."""
        self.books.read(self.load, self.placed_sequences)
        facts = self._pool.facts
        places = facts.max_running if self._pool.role == "decode" else 0
        name = self.identity.instance_id
        if self.books.is_full(self.placed_sequences, places):
            self._pool.full.add(name)
        else:
            self._pool.full.discard(name)
        self._pool.stale.add(self.number)

    def has_kv(self, positions: int) -> bool:
        return self.books.has_kv(self.placed_sequences, self._pool.facts.block_size, positions)

    def snapshot(self) -> WorkerSnapshot | None:
        """Returns None before the first report."""
        if self.load is None:
            return None
        pool = self._pool
        sequences, tokens, positions = self._fresh
        return WorkerSnapshot(
            self.identity,
            model=pool.fleet.model,
            load=self.load,
            layout=pool.fleet.layout,
            transports=("simulated",),
            block_size=pool.facts.block_size,
            num_blocks=pool.facts.num_blocks,
            kv_bytes_per_position=pool.fleet.kv_bytes,
            max_sequences=pool.facts.max_running if pool.role == "decode" else 0,
            number=self._index_number,
            placed_sequences=self.placed_sequences,
            placed_tokens=self._placed_tokens,
            fresh_sequences=sequences,
            fresh_tokens=tokens,
            fresh_positions=positions,
        )


class SeenPool:
    """All workers of a role. full: instance ids of workers that should get nothing more now; both
    pools share it."""

    def __init__(
        self, role: str, facts: WorkerFacts, fleet: FleetFacts, count: int, full: set[str]
    ) -> None:
        self.role = role
        self.facts = facts
        self.fleet = fleet
        self.full = full
        self.index = PrefixIndex()
        self.stale: set[int] = set()
        self.workers: list[Seen] = []
        self._snapshots: list[WorkerSnapshot | None] = []
        self._by_name: dict[str, Seen] = {}
        for _ in range(count):
            self.join()

    def join(self) -> int:
        """Adds a worker and returns its number."""
        seen = Seen(self, len(self.workers))
        self.workers.append(seen)
        self._snapshots.append(None)
        self._by_name[seen.identity.instance_id] = seen
        return seen.number

    def get(self, identity: WorkerIdentity | None) -> Seen | None:
        return None if identity is None else self._by_name[identity.instance_id]

    def view(self, hashes: bytes) -> PoolSnapshot:
        for number in self.stale:
            self._snapshots[number] = self.workers[number].snapshot()
        self.stale.clear()
        found = [snapshot for snapshot in self._snapshots if snapshot is not None]
        return PoolSnapshot(found, self.index.find(hashes))


LOOK_AGAIN_S = 0.05
REFRESH_S = 0.005
BUSY_S = 0.1
PATIENCE = 2.0
SWEEP_S = 0.1
TOO_LONG = "It does not fit a worker."
MAX_FULL = 64
"""How often a request may be rejected by full workers before it is refused."""


@dataclass(slots=True, eq=False)
class SimulatedWaiter:
    """A waiting request."""

    record: Record
    prompt: Prompt
    busy: dict[str, float] = field(default_factory=dict)
    """By instance id, the time until which a worker that rejected it is skipped."""
    waited: bool = False


Start = Callable[["Stay"], None]
"""Sends an attempt to its workers."""


class Stay:
    """The resources of one attempt in the router's accounting. Implements `Owner`."""

    def __init__(
        self, router: Router, entry: Entry[SimulatedWaiter], decision: Decision, seen: Seen | None,
        decode: Seen | None, now: float
    ) -> None:  # fmt: skip
        self.entry = entry
        self.prefill = seen
        self.decode = decode
        self._router = router
        self._placed_at = now
        self._input = input_tokens(entry.item)
        self._uncached = decision.uncached_tokens
        self._claimed = self._computing = True
        computing = seen or decode
        assert computing is not None
        self._computes = computing
        computing.books.computing += self._input
        if decode is not None:
            decode.books.kv += self._input + 1
        if seen is not None:
            seen.place(self._uncached, self._input)
        if decode is not None:
            decode.place(0 if seen is not None else self._uncached, self._input)
        router.window.take(self._input)

    def answered(self, queue_s: float, compute_s: float) -> None:
        if self._claimed:
            now, window = self._router.queue.now, self._router.window
            window.answered(self._input, now - self._placed_at)
            window.queued(queue_s, compute_s, now)
        self._give_back_claim()
        self._prefilled()
        self._router.turn()

    def ended(self) -> None:
        self._leave()
        self._router.done(self.entry)

    def failed(self, error: BatonError, *, full: bool, where: str) -> None:
        self._leave()
        if full:
            worker = self.decode if where == "decode" else self.prefill
            assert worker is not None
            self._router.again(self.entry, worker)
        else:
            fits = error.reason not in (Reason.CONTEXT_LENGTH_EXCEEDED, Reason.INVALID_ARGUMENT)
            self._router.refuse(self.entry, "A worker gave it up." if fits else TOO_LONG)

    def _give_back_claim(self) -> None:
        if self._claimed:
            self._claimed = False
            self._computes.books.computing -= self._input
            self._computes.changed()
            if self.decode is not None:
                self.decode.books.kv -= self._input + 1
                self.decode.changed()
            self._router.window.give_back(self._input)

    def _prefilled(self) -> None:
        if self._computing:
            self._computing = False
            self._computes.take_back(1 if self.prefill is not None else 0, self._uncached)

    def _leave(self) -> None:
        self._give_back_claim()
        self._prefilled()
        if self.decode is not None:
            self.decode.take_back(1, 0)


class Router:
    """start: sends off a request that has workers. ended: called for every finished request."""

    def __init__(
        self,
        facts: FleetFacts,
        queue: EventQueue,
        prefills: SeenPool,
        decodes: SeenPool,
        start: Start,
        ended: Callable[[SimulatedWaiter], None],
    ) -> None:
        limits = facts.router
        self.queue = queue
        self.window = limits.window()
        self.decisions = self.placed = self.refused = 0
        """Decisions; requests that got workers; requests that were refused, so far."""
        self._facts = facts
        self._prefills = prefills
        self._decodes = decodes
        self._start = start
        self._ended = ended
        self._waiting: FairQueue[SimulatedWaiter] = FairQueue(
            max_tokens=limits.routers * limits.max_queued_tokens,
            max_entries=limits.routers * limits.max_queued,
        )
        self._drain = DrainRate()
        self.waiting_tokens = 0
        """Tokens of waiting prompts, and those generated by earlier attempts."""
        self._turning: float | None = None
        self._turned_at = self._swept_at = float("-inf")

    def enter(self, record: Record, prompt: Prompt) -> None:
        """Queues a request whose tokens are known."""
        request = record.request
        cost = request.input_tokens + request.output_tokens
        entry = Entry(SimulatedWaiter(record, prompt), "", 1.0, 0, cost, self.queue.now)
        if not self._waiting.has_room("", cost):
            self.refuse(entry, "The queue is full.")
            return
        self._add(entry)
        self.turn()
        entry.item.waited = entry.item.record.placed is None

    def turn(self) -> None:
        """Places requests while there is room. If none can be placed, it retries only now and
        then."""
        now = self.queue.now
        if not len(self._waiting):
            return
        if now - self._turned_at < REFRESH_S:
            self._turn_at(self._turned_at + REFRESH_S)
            return
        self._sweep(now)
        while (found := self._next(now)) is not None:
            entry, stay = found
            self._take_out(entry, served=True)
            record = entry.item.record
            if record.placed is None:
                record.placed = now
                self.placed += 1
            record.attempts += 1
            self._start(stay)
        if len(self._waiting):
            self._turned_at = now
            self._turn_at(now + LOOK_AGAIN_S)
        self._note()

    def again(self, entry: Entry[SimulatedWaiter], worker: Seen) -> None:
        """Queues an attempt again that a full worker rejected."""
        waiter = entry.item
        self.window.congested(self.queue.now)
        waiter.busy[worker.identity.instance_id] = self.queue.now + BUSY_S
        if waiter.record.attempts >= MAX_FULL:
            self.refuse(entry, "No worker ever had room for it.")
            return
        cost = input_tokens(waiter) if waiter.record.tokens else 0
        self._add(Entry(waiter, "", 1.0, 0, cost, entry.arrived, resumed=True))
        self.turn()

    def refuse(self, entry: Entry[SimulatedWaiter], why: str) -> None:
        self._refused(entry, why)
        self.turn()

    def done(self, entry: Entry[SimulatedWaiter]) -> None:
        """Finishes a request that has all its tokens."""
        record = entry.item.record
        record.ended = record.last
        self._ended(entry.item)
        self.turn()

    def _refused(self, entry: Entry[SimulatedWaiter], why: str) -> None:
        entry.item.record.refused = why
        self.refused += 1
        self._ended(entry.item)

    def _turn_at(self, time: float) -> None:
        if self._turning is None or time < self._turning:
            self._turning = time
            self.queue.at(time, self._turns, time, order=IDLE)

    def _turns(self, time: float) -> None:
        if time == self._turning:
            self._turning = None
            self._turned_at = float("-inf")
            self.turn()

    def _next(self, now: float) -> tuple[Entry[SimulatedWaiter], Stay] | None:
        """Returns the first request that can be placed. No request overtakes another one with the
        same needs."""
        blocked: set[tuple[bool, bool]] = set()
        for entry in self._waiting.heads():
            waiter = entry.item
            size = input_tokens(waiter)
            needs_decode = waiter.record.request.output_tokens - waiter.record.tokens > 1
            kind = (needs_decode, size <= self._facts.router.policy.short)
            if kind in blocked:
                continue
            blocked.add(kind)
            if not self.window.has_room(size):
                continue
            decision = self._decide(waiter, size, needs_decode, now)
            if decision.wait:
                continue
            prefill = self._prefills.get(decision.prefill)
            decode = self._decodes.get(decision.decode)
            if decode is None or decode.has_kv(size + 1):
                return entry, Stay(self, entry, decision, prefill, decode, now)
        return None

    def _decide(
        self, waiter: SimulatedWaiter, size: int, needs_decode: bool, now: float
    ) -> Decision:
        busy = frozenset(self._prefills.full)
        if waiter.busy:
            waiter.busy = {name: end for name, end in waiter.busy.items() if end > now}
            busy |= waiter.busy.keys()
        self.decisions += 1
        hashes = waiter.prompt.hashes
        record = waiter.record
        demand = Demand(
            str(record.number),
            size,
            1,
            needs_decode,
            busy=busy,
            prefix_hashes=hashes,
            output_tokens=max(1, record.request.output_tokens - record.tokens),
        )
        prefills, decodes = self._prefills.view(hashes), self._decodes.view(hashes)
        return decide(demand, prefills, decodes, self._facts.router.policy, now)

    def _sweep(self, now: float) -> None:
        """Refuses requests that have waited too long."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        patience = PATIENCE * self._facts.router.max_queue_s
        late = self._waiting.hopeless(
            self._drain.least_wait_s, lambda entry: entry.arrived + patience, now
        )
        for entry in late:
            self._take_out(entry, served=False)
            self._refused(entry, "It would have to wait for too long.")

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _add(self, entry: Entry[SimulatedWaiter]) -> None:
        self._waiting.add(entry)
        self.waiting_tokens += input_tokens(entry.item)

    def _take_out(self, entry: Entry[SimulatedWaiter], *, served: bool) -> None:
        self.waiting_tokens -= input_tokens(entry.item)
        self._waiting.remove(entry, served=served)
        if served and not entry.resumed and entry.item.waited:
            self._drain.left(entry.tokens, self.queue.now)
        if not len(self._waiting):
            self._note()

    def _note(self) -> None:
        bounded = self._waiting.num_bounded
        self._drain.waiting(self.queue.now, self._waiting.tokens / bounded if bounded else None)


def input_tokens(waiter: SimulatedWaiter) -> int:
    """Returns the input tokens of its next attempt: the prompt and the tokens generated so far."""
    return waiter.prompt.length + waiter.record.tokens
