"""simulate, a fleet and its traffic from the first request to the last; reads no files.

Everything that decides is core's: both schedulers with their pools and prefix caches, the fair
queue, the flight window, the routing policy over reports. What is made up is time: how long steps,
messages, hand-overs take is told by `FleetFacts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.core.errors import Internal, InvalidArgument
from baton.core.kvcache.cache_events import CacheBatch
from baton.core.routing.load import WorkerLoad
from baton_loadtest.simulator.attempt_run import AttemptRun, SimulatedReceiver, SimulatedSender
from baton_loadtest.simulator.decode_worker import DecodeWorker
from baton_loadtest.simulator.intake import attempt_of
from baton_loadtest.simulator.link import Link
from baton_loadtest.simulator.prefill_worker import PrefillWorker
from baton_loadtest.simulator.prompts import Prompt
from baton_loadtest.simulator.queue import IDLE, EventQueue
from baton_loadtest.simulator.reports import Tell
from baton_loadtest.simulator.requests import Record, Request
from baton_loadtest.simulator.router import PATIENCE, Router, SimulatedWaiter, Stay
from baton_loadtest.simulator.seen import SeenPool
from baton_loadtest.simulator.settings import FleetFacts
from baton_loadtest.simulator.use import Use

STUCK_S = 60.0
"""Between two looks whether anything moves, besides what requests may wait."""

LEFT_S = 0.25
"""Between two looks whether a leaving worker has nothing left."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """records: by number, in order of arrival. prefills, decodes: use by worker number. end: when
    the last thing happened, in virtual seconds. link_s: in which each decode worker's link was
    busy. events, decisions: how many the simulation took; preemptions: of decode workers."""

    records: list[Record]
    prefills: list[Use]
    decodes: list[Use]
    end: float
    link_s: list[float]
    events: int
    decisions: int
    preemptions: int


class Simulation:
    """One run. `run` is called once."""

    def __init__(self, facts: FleetFacts) -> None:
        self.queue = queue = EventQueue()
        self._facts = facts
        self._records: list[Record] = []
        self._over = 0
        self._all_came = False
        self.arrived_s = 0.0
        """Of a prefill worker's time that all prompts so far take, with nothing cached."""
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
        """One more worker, which serves from now on. Its number."""
        facts, queue = self._facts, self.queue
        link = Link(facts.decode.speed.link_bytes_per_s)
        if role == "prefill":
            number = self._prefills.join()
            tell = self._hearing(self._prefills, number)
            sender = PrefillWorker(
                number, facts.prefill, facts.model, facts.delays, queue, self._sharing, tell
            )
            self.senders.append(SimulatedSender(sender, link))
        else:
            number = self._decodes.join()
            tell = self._hearing(self._decodes, number)
            receiver = DecodeWorker(
                number, facts.decode, facts.model, facts.delays, queue, tell, skip=facts.skip
            )
            self.receivers.append(SimulatedReceiver(receiver, link))
            self._share()
        return number

    def leave(self, role: str, number: int, left: Callable[[], None]) -> None:
        """A worker takes nothing new and finishes what it has; `left` is called when it is gone."""
        self._ends(role)[number].worker.leave()
        self._look_whether_left(role, number, left)

    def _ends(self, role: str) -> Sequence[SimulatedSender | SimulatedReceiver]:
        return self.senders if role == "prefill" else self.receivers

    def _look_whether_left(self, role: str, number: int, left: Callable[[], None]) -> None:
        pool = self._prefills if role == "prefill" else self._decodes
        seen = pool.workers[number]
        # What routers have sent and it does not have yet counts, too.
        if self._ends(role)[number].worker.is_empty and not seen.placed_sequences:
            seen.gone()
            self._share()
            left()
        else:
            later = self.queue.now + LEFT_S
            self.queue.at(later, self._look_whether_left, role, number, left, order=IDLE)

    @property
    def _sharing(self) -> int:
        """Decode workers that share a prefill worker's pool."""
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
        """requests: in order of arrival. until: what has no answer by then never gets one.
        progress: told the time and the number of requests over, now and then.

        Raises InvalidArgument for requests out of order or of impossible lengths, Internal when
        requests are open and nothing moves.
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
    def is_over(self) -> bool:
        """Whether every request has come, and has its fate."""
        return self._all_came and self._over == len(self._records)

    def check(self) -> None:
        """Raises InvariantBroken when a worker's books disagree. For tests."""
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

    def _hearing(self, pool: SeenPool, number: int) -> Tell:
        def hear(load: WorkerLoad, batches: list[CacheBatch]) -> None:
            pool.workers[number].report(load, batches)
            self.router.turn()

        return hear

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
        self.arrived_s += self._facts.prefill.told.prefill_s(0, request.input_tokens)
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
    """Raises InvalidArgument."""
    return Simulation(facts).run(requests)
