"""simulate, a fleet and its traffic from the first request to the last; reads no files.

Everything that decides is core's: both schedulers with their pools and prefix caches, the fair
queue, the flight window, the routing policy over reports. What is made up is time: how long steps,
messages, hand-overs take is told by `FleetFacts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from baton.core.cache_log import CacheBatch
from baton.core.errors import Internal, InvalidArgument
from baton.core.load import WorkerLoad
from baton.sim.attempt_run import AttemptRun, Collector, Giver
from baton.sim.decode_worker import DecodeWorker
from baton.sim.intake import attempt_of
from baton.sim.link import Link
from baton.sim.prefill_worker import PrefillWorker
from baton.sim.prompts import Prompt
from baton.sim.queue import EventQueue
from baton.sim.reports import Tell
from baton.sim.requests import Record, Request
from baton.sim.router import PATIENCE, Router, Stay, Waiter
from baton.sim.seen import SeenPool
from baton.sim.settings import FleetFacts
from baton.sim.use import Use

STUCK_S = 60.0
"""Between two looks whether anything moves, besides what requests may wait."""


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
        self._progress: Callable[[float, int], None] = lambda now, done: None
        full: set[str] = set()
        seen_prefills = SeenPool("prefill", facts.prefill, facts, facts.prefills, full)
        seen_decodes = SeenPool("decode", facts.decode, facts, facts.decodes, full)
        self.router = Router(
            facts, queue, seen_prefills, seen_decodes, start=self._start, ended=self._ended
        )
        rate = facts.decode.speed.link_bytes_per_s
        model, delays = facts.model, facts.delays
        self.givers = [
            Giver(
                PrefillWorker(
                    number,
                    facts.prefill,
                    model,
                    delays,
                    queue,
                    facts.decodes,
                    self._hearing(seen_prefills, number),
                ),
                Link(rate),
            )
            for number in range(facts.prefills)
        ]
        self.collectors = [
            Collector(
                DecodeWorker(
                    number,
                    facts.decode,
                    model,
                    delays,
                    queue,
                    self._hearing(seen_decodes, number),
                    skip=facts.skip,
                ),
                Link(rate),
            )
            for number in range(facts.decodes)
        ]

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
        workers = [collector.worker for collector in self.collectors]
        return Outcome(
            self._records,
            [giver.worker.use for giver in self.givers],
            [worker.use for worker in workers],
            max((r.ended or 0.0 for r in self._records), default=0.0),
            [collector.link.busy_s for collector in self.collectors],
            self.queue.num_done,
            self.router.decisions,
            sum(sum(worker.scheduler.preemptions.values()) for worker in workers),
        )

    def check(self) -> None:
        """Raises InvariantBroken when a worker's books disagree. For tests."""
        for giver in self.givers:
            giver.worker.scheduler.check()
        for collector in self.collectors:
            collector.worker.scheduler.check()

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
        if request is not None:
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
            None if prefill is None else self.givers[prefill.number],
            None if decode is None else self.collectors[decode.number],
            stay,
        ).start()

    def _ended(self, waiter: Waiter) -> None:
        waiter.prompt.forget()
        self._over += 1
        if not self._over % 256:
            self._progress(self.queue.now, self._over)


def simulate(facts: FleetFacts, requests: Iterable[Request]) -> Outcome:
    """Raises InvalidArgument."""
    return Simulation(facts).run(requests)
