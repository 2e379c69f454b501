"""Router, where requests wait and get workers: core's fair queue, flight window and policy.

As in the router itself an attempt gets workers when it is its turn, the window has room, and there
are workers that are not full; who waits in vain is refused. Knows workers only by their reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.admission.fair_queue import DrainRate, Entry, FairQueue
from baton.core.errors import BatonError, Reason
from baton.core.routing.routing import Decision, Demand, decide
from baton_loadtest.simulator.prompts import Prompt
from baton_loadtest.simulator.queue import IDLE, EventQueue
from baton_loadtest.simulator.requests import Record
from baton_loadtest.simulator.seen import Seen, SeenPool
from baton_loadtest.simulator.settings import FleetFacts

LOOK_AGAIN_S = 0.05
REFRESH_S = 0.005
BUSY_S = 0.1
PATIENCE = 2.0
SWEEP_S = 0.1
TOO_LONG = "It does not fit a worker."
MAX_FULL = 64
"""How often a request may find its workers full before it is refused."""


@dataclass(slots=True, eq=False)
class SimulatedWaiter:
    """busy: until when workers that refused it are passed over, by instance id."""

    record: Record
    prompt: Prompt
    busy: dict[str, float] = field(default_factory=dict)
    waited: bool = False


Start = Callable[["Stay"], None]
"""Sends an attempt to its workers."""


class Stay:
    """Implements `Owner`: what one attempt takes of its workers, as the router counts it."""

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
    """start: sends off what got its workers. ended: told of every request that is over."""

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
        self.decisions = 0
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
        """Of prompts, and of what was made in attempts before."""
        self._turning: float | None = None
        self._turned_at = self._swept_at = float("-inf")

    def enter(self, record: Record, prompt: Prompt) -> None:
        """A request whose tokens are known."""
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
        """There may be room. While nobody gets a place one looks again now and then only."""
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
            record.placed = now if record.placed is None else record.placed
            record.attempts += 1
            self._start(stay)
        if len(self._waiting):
            self._turned_at = now
            self._turn_at(now + LOOK_AGAIN_S)
        self._note()

    def again(self, entry: Entry[SimulatedWaiter], worker: Seen) -> None:
        """An attempt was refused as too much by a worker; another one follows."""
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
        entry.item.record.refused = why
        self._ended(entry.item)
        self.turn()

    def done(self, entry: Entry[SimulatedWaiter]) -> None:
        """It has all its tokens."""
        record = entry.item.record
        record.ended = record.last
        self._ended(entry.item)
        self.turn()

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
        """The first that need not wait any longer. Nobody passes another one who wants the same."""
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
        """Refuses those who would wait in vain."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        patience = PATIENCE * self._facts.router.max_queue_s
        late = self._waiting.hopeless(
            self._drain.least_wait_s, lambda entry: entry.arrived + patience, now
        )
        for entry in late:
            self._take_out(entry, served=False)
            entry.item.record.refused = "It would have to wait for too long."
            self._ended(entry.item)

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
    """Of its next attempt: the prompt and what was made."""
    return waiter.prompt.length + waiter.record.tokens
