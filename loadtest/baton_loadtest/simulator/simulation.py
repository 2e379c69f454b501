"""Simulates a fleet and its traffic from the first request to the last.

All decisions are made by core: both schedulers with their pools and prefix caches, the fair queue,
the concurrency limiter, the routing policy on workers' reports. Only time is simulated:
`FleetFacts` has the durations of steps, messages and hand-overs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_loadtest.simulator.prompts import Prompt, attempt_of
from baton_loadtest.simulator.queue import IDLE, EventQueue
from baton_loadtest.simulator.requests import Record, Request
from baton_loadtest.simulator.router import PATIENCE, Router, SeenPool, SimulatedWaiter, Stay
from baton_loadtest.simulator.settings import FleetFacts
from baton_loadtest.simulator.workers import DecodeWorker, OnReport, PrefillWorker, Use
from batonlm.core.errors import BatonError, Internal, InvalidArgument, Overloaded
from batonlm.core.kvcache.cache_events import CacheBatch
from batonlm.core.request.attempt import Attempt
from batonlm.core.routing.load import WorkerLoad


class Link:
    """A worker's end of the network for KV, which moves one transfer after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.busy_s = 0.0
        self.bytes = 0

    def take(self, now: float, num_bytes: int) -> float:
        """Returns when bytes that are ready now have passed this end."""
        seconds = num_bytes / self._bytes_per_s if num_bytes else 0.0
        self._free_at = max(self._free_at, now) + seconds
        self.busy_s += seconds
        self.bytes += num_bytes
        return self._free_at


def moved(now: float, num_bytes: int, sender: Link, receiver: Link) -> float:
    """Returns when the bytes are at the receiver. Both ends are occupied at the same time."""
    return max(sender.take(now, num_bytes), receiver.take(now, num_bytes))


class Owner(Protocol):
    """The router's side of an attempt. Each method is called when the router receives the news."""

    def answered(self, queue_s: float, compute_s: float) -> None:
        """The first token, or all KV, has arrived. It may be called twice."""

    def ended(self) -> None:
        """All its tokens have arrived."""

    def failed(self, error: BatonError, *, full: bool, where: str) -> None:
        """The attempt failed. full: the worker of role `where` had no room."""


class SimulatedSender:
    """A prefill worker and its end of the network."""

    def __init__(self, worker: PrefillWorker, link: Link) -> None:
        self.worker = worker
        self.link = link


class SimulatedReceiver:
    """A decode worker and its end of the network."""

    def __init__(self, worker: DecodeWorker, link: Link) -> None:
        self.worker = worker
        self.link = link


class AttemptRun:
    """One attempt on its workers: both phases and the hand-over. Implements `Run`.

        prefill plans its first chunk ──► decode reserves ──► prefill may send ──► KV in chunks
        the last chunk has arrived ──► the hand-over's end (handover_s) ──► decode continues

    If decode has no room the attempt fails, and the router places the request again.

    Without a receiver prefill makes the only token; without a sender decode computes the prompt. At
    least one is set.
    """

    def __init__(
        self,
        queue: EventQueue,
        hop_s: float,
        kv_bytes: int,
        record: Record,
        attempt: Attempt,
        sender: SimulatedSender | None,
        receiver: SimulatedReceiver | None,
        owner: Owner,
    ) -> None:
        self.record = record
        self._queue = queue
        self._hop_s = hop_s
        self._kv_bytes = kv_bytes
        self._attempt = attempt
        self._size = len(attempt.token_ids)
        self._sender = sender
        self._receiver = receiver
        self._owner = owner
        self._over = False
        self._granted = False
        self._computed = self._sent = 0

    def start(self) -> None:
        """Sends the attempt from the router to its workers."""
        self._queue.after(self._hop_s, self._arrive)

    def planned(self) -> None:
        if self._receiver is not None:
            self._queue.after(self._hop_s, self._reserve)

    def computed(self, end: int, cached: int) -> None:
        if self._over:
            return
        self._computed = end
        self.record.cached_tokens = cached
        self._send()

    def first_token(self, queue_s: float, compute_s: float) -> None:
        if self._over:
            return
        self.record.token(self._queue.now + self._hop_s)
        self._tell(self._owner.answered, queue_s, compute_s)
        if self._receiver is None:
            self.ended()
            self._unpin()

    def started(self, cached: int) -> None:
        if self._sender is None:
            self.record.cached_tokens = cached
        self._tell(self._owner.answered, 0.0, 0.0)

    def ended(self) -> None:
        self._over = True
        self._tell(self._owner.ended)

    def failed(self, error: BatonError) -> None:
        self._fail(error, full=False, where="")

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        self._queue.after(self._hop_s, what, *args)

    def _fail(self, error: BatonError, *, full: bool, where: str) -> None:
        if not self._over:
            self._over = True
            self._queue.after(self._hop_s, self._gave_up, error, full, where)

    def _gave_up(self, error: BatonError, full: bool, where: str) -> None:
        self._owner.failed(error, full=full, where=where)

    def _arrive(self) -> None:
        try:
            if self._sender is not None:
                receiver = "" if self._receiver is None else str(self._receiver.worker.number)
                self._sender.worker.add(
                    self._attempt, self, keep=self._receiver is not None, receiver=receiver
                )
            else:
                assert self._receiver is not None
                self._receiver.worker.add(self._attempt, self)
        except BatonError as error:
            where = "decode" if self._sender is None else "prefill"
            self._fail(error, full=isinstance(error, Overloaded), where=where)

    def _reserve(self) -> None:
        assert self._receiver is not None
        try:
            needed = self._receiver.worker.reserve(self._attempt, self)
        except BatonError as error:
            self._unpin()
            self._fail(error, full=False, where="decode")
            return
        if needed is None:
            self._unpin()
            self._fail(Overloaded("There is no room for its KV."), full=True, where="decode")
            return
        self._sent = needed
        self._queue.after(self._hop_s, self._may_send)

    def _may_send(self) -> None:
        assert self._sender is not None
        self._granted = True
        self._sender.worker.grant(self._attempt.key)
        self._send()

    def _send(self) -> None:
        """Sends what is computed and not yet sent. After the last part the hand-over ends."""
        if not self._granted or self._sender is None or self._receiver is None:
            return
        positions = max(0, self._computed - self._sent)
        last = self._computed == self._size
        if not positions and not last:
            return
        self._sent += positions
        self.record.moved_tokens += positions
        now = self._queue.now
        arrived = moved(now, positions * self._kv_bytes, self._sender.link, self._receiver.link)
        if last:
            self._granted = False
            tail_s = self._receiver.worker.facts.speed.handover_s
            self._queue.at(arrived + tail_s, self._complete)

    def _complete(self) -> None:
        assert self._receiver is not None
        self._receiver.worker.admit(self._attempt)
        self._unpin()

    def _unpin(self) -> None:
        """Releases the KV at prefill, after the delay of a message."""
        assert self._sender is not None
        self._queue.after(self._hop_s, self._sender.worker.release, self._attempt.key)


STUCK_S = 60.0
"""Interval of checks for progress, in addition to the time that requests may wait."""

LEFT_S = 0.25
"""Interval of checks whether a leaving worker is empty."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation."""

    records: list[Record]
    """By number, in order of arrival."""
    prefills: list[Use]
    """By worker number."""
    decodes: list[Use]
    """By worker number."""
    end: float
    """Virtual seconds at the last event."""
    link_s: list[float]
    """How long each decode worker's link was busy."""
    events: int
    """Number of events of the simulation."""
    decisions: int
    """Number of placement decisions."""
    preemptions: int
    """Of decode workers."""


class Simulation:
    """One run. `run` may be called once."""

    def __init__(self, facts: FleetFacts) -> None:
        self.queue = queue = EventQueue()
        self._facts = facts
        self._records: list[Record] = []
        self._over = 0
        self._all_came = False
        self.arrived_s = 0.0
        """Prefill time of all prompts so far, without cached prefixes."""
        self._progress: Callable[[float, int], None] = lambda now, done: None
        full: set[str] = set()
        self._prefills = SeenPool("prefill", facts.prefill, facts, 0, full)
        self._decodes = SeenPool("decode", facts.decode, facts, 0, full)
        self.router = Router(
            facts, queue, self._prefills, self._decodes, start=self._start, ended=self._ended
        )
        self.senders: list[SimulatedSender] = []
        self.receivers: list[SimulatedReceiver] = []
        for _ in range(facts.decodes):
            self.join("decode")
        for _ in range(facts.prefills):
            self.join("prefill")

    def join(self, role: str) -> int:
        """Adds a worker, which serves from now on, and returns its number."""
        facts, queue = self._facts, self.queue
        link = Link(facts.decode.speed.link_bytes_per_s)
        if role == "prefill":
            number = self._prefills.join()
            tell = self._taker(self._prefills, number)
            sender = PrefillWorker(
                number, facts.prefill, facts.model, facts.delays, queue, self._sharing, tell
            )
            self.senders.append(SimulatedSender(sender, link))
        else:
            number = self._decodes.join()
            tell = self._taker(self._decodes, number)
            receiver = DecodeWorker(
                number, facts.decode, facts.model, facts.delays, queue, tell, skip=facts.skip
            )
            self.receivers.append(SimulatedReceiver(receiver, link))
            self._share()
        return number

    def leave(self, role: str, number: int, left: Callable[[], None]) -> None:
        """Drains a worker: it accepts nothing new; `left` is called when it is empty."""
        self._ends(role)[number].worker.leave()
        self._look_whether_left(role, number, left)

    def _ends(self, role: str) -> Sequence[SimulatedSender | SimulatedReceiver]:
        return self.senders if role == "prefill" else self.receivers

    def _look_whether_left(self, role: str, number: int, left: Callable[[], None]) -> None:
        pool = self._prefills if role == "prefill" else self._decodes
        seen = pool.workers[number]
        # Attempts that routers have sent but that have not arrived count, too.
        if self._ends(role)[number].worker.is_empty and not seen.placed_sequences:
            seen.gone()
            self._share()
            left()
        else:
            later = self.queue.now + LEFT_S
            self.queue.at(later, self._look_whether_left, role, number, left, order=IDLE)

    @property
    def _sharing(self) -> int:
        """The number of decode workers that share a prefill worker's pool."""
        return max(1, sum(not seen.is_gone for seen in self._decodes.workers))

    def _share(self) -> None:
        for sender in self.senders:
            sender.worker.scheduler.live_receivers = self._sharing

    def run(
        self,
        requests: Iterable[Request],
        *,
        until: float = float("inf"),
        progress: Callable[[float, int], None] = lambda now, done: None,
    ) -> Outcome:
        """Runs all requests, in order of arrival. until: the time at which the simulation stops.
        progress: called now and then with the time and the number of finished requests.

        Raises InvalidArgument for requests out of order or of impossible lengths, Internal if
        requests are open and nothing makes progress.
        """
        self._progress = progress
        self._arrive_next(iter(requests))
        self._run(until)
        workers = [receiver.worker for receiver in self.receivers]
        return Outcome(
            self._records,
            [sender.worker.use for sender in self.senders],
            [worker.use for worker in workers],
            max((r.ended or 0.0 for r in self._records), default=0.0),
            [receiver.link.busy_s for receiver in self.receivers],
            self.queue.num_done,
            self.router.decisions,
            sum(sum(worker.scheduler.preemptions.values()) for worker in workers),
        )

    @property
    def num_arrived(self) -> int:
        """Requests so far."""
        return len(self._records)

    @property
    def is_over(self) -> bool:
        """Whether every request has arrived and is finished or refused."""
        return self._all_came and self._over == len(self._records)

    def check(self) -> None:
        """Raises InvariantBroken if a worker's accounting is inconsistent. For tests."""
        for sender in self.senders:
            sender.worker.scheduler.check()
        for receiver in self.receivers:
            receiver.worker.scheduler.check()

    def _run(self, until: float) -> None:
        look_s = STUCK_S + 2 * PATIENCE * self._facts.router.max_queue_s
        end, was_idle = look_s, False
        while not self.queue.run(min(until, end)) and end < until:
            is_idle = self._over < len(self._records) and self.queue.is_idle
            if is_idle and was_idle:
                raise Internal("The simulation is stuck: requests are open and nothing moves.")
            end, was_idle = end + look_s, is_idle

    def _taker(self, pool: SeenPool, number: int) -> OnReport:
        def take(load: WorkerLoad, batches: list[CacheBatch]) -> None:
            pool.workers[number].report(load, batches)
            self.router.turn()

        return take

    def _arrive_next(self, requests: Iterator[Request]) -> None:
        request = next(requests, None)
        if request is None:
            self._all_came = True
        else:
            if request.arrival < self.queue.now:
                raise InvalidArgument("must not be before the one before it", field="arrival")
            for name in ("input_tokens", "output_tokens"):
                if getattr(request, name) < 1:
                    raise InvalidArgument("must be at least 1", field=name)
            for facts in (self._facts.prefill, self._facts.decode):
                if request.stretch % facts.block_size:
                    raise InvalidArgument(
                        f"must divide {request.stretch}, the tokens that a prompt's names stand "
                        "for each",
                        field="block_size",
                    )
            self.queue.at(request.arrival, self._arrive, request, requests)

    def _arrive(self, request: Request, requests: Iterator[Request]) -> None:
        record = Record(len(self._records), request)
        self._records.append(record)
        self.arrived_s += self._facts.prefill.reported.prefill_s(0, request.input_tokens)
        prompt = Prompt(record.number, request.input_tokens, request.names, request.stretch)
        self.queue.after(self._facts.delays.tokenize_s, self.router.enter, record, prompt)
        self._arrive_next(requests)

    def _start(self, stay: Stay) -> None:
        waiter = stay.entry.item
        record = waiter.record
        prefill, decode = stay.prefill, stay.decode
        record.prefill = None if prefill is None else prefill.number
        record.decode = None if decode is None else decode.number
        AttemptRun(
            self.queue,
            self._facts.delays.hop_s,
            self._facts.kv_bytes,
            record,
            attempt_of(
                str(record.number),
                record.attempts,
                waiter.prompt,
                record.request.output_tokens,
                record.tokens,
            ),
            None if prefill is None else self.senders[prefill.number],
            None if decode is None else self.receivers[decode.number],
            stay,
        ).start()

    def _ended(self, waiter: SimulatedWaiter) -> None:
        waiter.prompt.forget()
        self._over += 1
        if not self._over % 256:
            self._progress(self.queue.now, self._over)


def simulate(facts: FleetFacts, requests: Iterable[Request]) -> Outcome:
    """Runs a simulation. Raises InvalidArgument."""
    return Simulation(facts).run(requests)
