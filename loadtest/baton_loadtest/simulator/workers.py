"""Simulated workers of both roles, with core's schedulers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from baton_loadtest.simulator.prompts import (
    TOKEN,
    CountingDrafter,
    CountingScheduler,
    CountingSequence,
)
from baton_loadtest.simulator.queue import IDLE, STEP_ENDS, EventQueue
from baton_loadtest.simulator.requests import Cadence, Record, of_steps
from baton_loadtest.simulator.settings import Delays, WorkerFacts
from baton_loadtest.simulator.skipping import SkippingScheduler
from batonlm.core.errors import BatonError
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.kvcache.cache_events import CacheBatch, CacheLog, CacheReader, Change
from batonlm.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, SequenceKey
from batonlm.core.request.model import ModelDescription
from batonlm.core.routing.load import WorkerLoad, WorkerSpeed, WorkerState, reads
from batonlm.core.scheduler.events import (
    AttemptFailed,
    Computed,
    Event,
    FirstTokens,
    KvComplete,
    NewTokens,
    Planned,
)
from batonlm.core.scheduler.plan import SampledToken, StepPlan, StepResult
from batonlm.core.scheduler.scheduler import Scheduler


class Run(Protocol):
    """Receives the events of one attempt, each at the time at which it happens on the worker."""

    @property
    def record(self) -> Record: ...

    def planned(self) -> None:
        """Prefill: the first chunk is in the step that begins now."""

    def computed(self, end: int, cached: int) -> None:
        """Prefill: KV of all positions before `end` is ready, `cached` of it from the cache."""

    def first_token(self, queue_s: float, compute_s: float) -> None:
        """Prefill: token 0 is sampled."""

    def started(self, cached: int) -> None:
        """Decode: all KV has arrived."""

    def ended(self) -> None:
        """Decode: the newest token was the last one."""

    def failed(self, error: BatonError) -> None:
        """The scheduler failed the attempt."""


@dataclass(slots=True)
class Use:
    """How busy one worker was."""

    busy_s: float = 0.0
    """Seconds in which a step ran."""
    steps: int = 0
    rows: int = 0
    """Sequences, counted once per decode step."""
    prefilled: int = 0
    """Prefilled positions."""
    peak_blocks: int = 0
    """Maximum number of blocks in use at the end of a step."""
    block_s: float = 0.0
    """Blocks in use times seconds of steps."""
    drafts: int = 0
    """Drafts that were computed."""
    saved_steps: int = 0
    """How many more steps sequences would have taken without them."""

    def ran(
        self, seconds: float, steps: int, rows: int, prefilled: int, before: int, after: int
    ) -> None:
        """Records steps with a total duration. before, after: blocks in use."""
        self.busy_s += seconds
        self.steps += steps
        self.rows += rows
        self.prefilled += prefilled
        self.peak_blocks = max(self.peak_blocks, after)
        self.block_s += seconds * (before + after) / 2


OnReport = Callable[[WorkerLoad, list[CacheBatch]], None]


class Reporter:
    """Reports a worker's load to the router: at regular intervals if there is news, and from busy
    workers at least every heartbeat. The growth of running sequences by a token per step is not
    news.

    changes: those of the prefix cache. load: called for each report. phase: offset as a share of
    the interval, because workers do not all report at the same time.
    """

    def __init__(
        self,
        queue: EventQueue,
        delays: Delays,
        changes: deque[Change],
        load: Callable[[], tuple[WorkerLoad, bool]],
        phase: float,
        on_report: OnReport,
    ) -> None:
        self._queue = queue
        self._delays = delays
        self._load = load
        self._on_report = on_report
        self._reader = CacheReader(CacheLog(changes))
        self._phase_s = phase * delays.report_s
        self._next: float | None = None
        self._look()

    def news(self) -> None:
        """A sequence joined or left, or a prompt was computed."""
        distance, now = self._delays.report_s, self._queue.now
        tick = ceil((now - self._phase_s) / distance) * distance + self._phase_s
        if self._next is None or tick < self._next:
            self._next = tick
            self._queue.at(tick, self._due, tick, order=IDLE)

    def _due(self, tick: float) -> None:
        if tick == self._next:
            self._look()

    def _look(self) -> None:
        load, busy = self._load()
        self._next = None
        arrives = self._queue.now + self._delays.hop_s
        self._queue.at(arrives, self._on_report, load, self._reader.read(), order=IDLE)
        if busy:
            self._next = beat = self._queue.now + self._delays.heartbeat_s
            self._queue.at(beat, self._due, beat, order=IDLE)


class SimWorker(ABC):
    """Base of simulated workers: a pool, running attempts, and reports to the router. A subclass
    has the scheduler, and calls `_report` once it exists. number: in its role's pool.
    """

    scheduler: Scheduler

    def __init__(
        self,
        number: int,
        facts: WorkerFacts,
        delays: Delays,
        queue: EventQueue,
        on_report: OnReport,
    ) -> None:
        self.number = number
        self.facts = facts
        self.use = Use()
        self._changes: deque[Change] = deque()
        self.pool = BlockPool(facts.num_blocks, facts.block_size, self._changes.append)
        self._queue = queue
        self._delays = delays
        self._on_report = on_report
        self._runs: dict[AttemptKey, Run] = {}
        self._state = WorkerState.SERVING

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a step runs."""

    @property
    def is_empty(self) -> bool:
        """Whether no attempt uses it any more."""
        return not self._runs

    def leave(self) -> None:
        """Drains: finishes its attempts, and reports that it accepts nothing new."""
        self._state = WorkerState.DRAINING
        self._reporter.news()

    def load(self) -> tuple[WorkerLoad, bool]:
        """Returns its current load, and whether it has work."""
        counted = self.scheduler.load
        load = WorkerLoad(
            self._state,
            counted.waiting_sequences,
            counted.waiting_tokens,
            counted.running_sequences,
            self._free_blocks(counted.free_blocks),
            speed=self.facts.reported,
        )
        return load, self.scheduler.has_work

    def _free_blocks(self, counted: int) -> int:
        """Returns the pool's free blocks now; counted: as the scheduler counts them."""
        return counted

    def _report(self) -> None:
        phase = (self.number * 0.618034) % 1.0
        self._reporter = Reporter(
            self._queue, self._delays, self._changes, self.load, phase, self._on_report
        )

    @property
    def _used(self) -> int:
        return self.pool.num_blocks - self.pool.num_free


class PrefillWorker(SimWorker):
    """Core's prefill scheduler, with step durations from the worker's speed.

    receivers: number of decode workers that share its pool.
    """

    def __init__(
        self,
        number: int,
        facts: WorkerFacts,
        model: ModelDescription,
        delays: Delays,
        queue: EventQueue,
        receivers: int,
        on_report: OnReport,
    ) -> None:
        super().__init__(number, facts, delays, queue, on_report)
        self.scheduler: CountingScheduler = CountingScheduler(
            self.pool, facts.prefill_policy(), model
        )
        self.scheduler.live_receivers = receivers
        self._running = False
        self._wake: float | None = None
        self._report()

    def add(self, attempt: Attempt, run: Run, *, keep: bool, receiver: str) -> None:
        """Raises the scheduler's errors."""
        self.scheduler.add(attempt, self._queue.now, keep=keep, receiver=receiver)
        self._runs[attempt.key] = run
        self._reporter.news()
        self._go_on()

    @property
    def is_busy(self) -> bool:
        return self._running

    def grant(self, key: AttemptKey) -> None:
        self.scheduler.grant(key)
        self._go_on()

    def release(self, key: AttemptKey) -> None:
        """Releases KV that was collected or is no longer needed."""
        self.scheduler.cancel(key)
        self._runs.pop(key, None)
        self._reporter.news()
        self._go_on()

    def _go_on(self) -> None:
        if self._running:
            return
        now = self._queue.now
        before = self._used
        plan = self.scheduler.plan(now)
        self._deliver(self.scheduler.take_events())
        if plan is None:
            wake = self.scheduler.next_wake(now)
            if wake is not None and wake != self._wake:
                self._wake = wake
                self._queue.at(wake, self._wakes)
            return
        self._running = True
        seconds = step_s(self.facts.speed, plan)
        self._queue.at(now + seconds, self._finish, plan, seconds, before, order=STEP_ENDS)

    def _wakes(self) -> None:
        self._wake = None
        self._go_on()

    def _finish(self, plan: StepPlan, seconds: float, before: int) -> None:
        self._running = False
        now = self._queue.now
        self.use.ran(seconds, 1, 0, plan.num_tokens, before, self._used)
        self._deliver(self.scheduler.apply(made_up(plan), now))
        self._reporter.news()
        self._go_on()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Planned(key):
                    self._runs[key].planned()
                case Computed(key, end, cached) if key in self._runs:
                    self._runs[key].computed(end, cached)
                case FirstTokens(key) if key in self._runs:
                    self._runs[key].first_token(event.queue_s, event.prefill_s)
                case AttemptFailed(key, _, error) if key in self._runs:
                    self._runs.pop(key).failed(error)
                case _:
                    pass


def step_s(speed: WorkerSpeed, plan: StepPlan) -> float:
    """Returns the seconds of a step that only prefills."""
    return speed.prefill_step_s + prefill_s(speed, plan, 0)


def prefill_s(speed: WorkerSpeed, plan: StepPlan, first: int) -> float:
    """Returns the seconds of a step's chunks from `first` on, without the step's constant time."""
    positions = num_reads = 0
    for chunk in plan.chunks[first:]:
        positions += len(chunk.token_ids)
        num_reads += reads(chunk.first_position, chunk.end_position)
    return positions * speed.prefill_position_s + num_reads * speed.prefill_read_s


def made_up(plan: StepPlan) -> StepResult:
    """Returns a token for every sample."""
    tokens = [
        SampledToken(row.sequence_id, row.choice, TOKEN)
        for chunk in plan.chunks
        for row in chunk.samples
    ]
    return StepResult(plan.step, tuple(tokens))


@dataclass(slots=True, eq=False)
class _Quiet:
    """Quiet steps in progress. rows: their sequences. begun: the first step has its blocks."""

    cadence: Cadence
    steps: int
    rows: list[CountingSequence]
    begun: bool


class DecodeWorker(SimWorker):
    """Core's decode scheduler, with step durations from the worker's speed.

    Quiet steps (see `SkippingScheduler`) are taken at once until the next call from outside. At a
    call, the steps that ended by then are applied and the next one is in progress, which is the
    same state as with single steps.

    skip: whether quiet steps are taken at once. Where it drafts, no step is quiet.
    """

    def __init__(
        self,
        number: int,
        facts: WorkerFacts,
        model: ModelDescription,
        delays: Delays,
        queue: EventQueue,
        on_report: OnReport,
        *,
        skip: bool,
    ) -> None:
        super().__init__(number, facts, delays, queue, on_report)
        right = facts.drafts_right
        drafter = CountingDrafter(right, number) if right else None
        self.scheduler: SkippingScheduler = SkippingScheduler(
            self.pool, facts.decode_policy(), model, drafter=drafter
        )
        self._hop_s = delays.hop_s
        self._skip = skip and drafter is None
        self._plan: StepPlan | None = None
        self._quiet: _Quiet | None = None
        self._report()

    def add(self, attempt: Attempt, run: Run) -> None:
        """Adds an attempt whose prompt is computed here. Raises the scheduler's errors."""
        self._catch_up()
        try:
            self.scheduler.add(attempt, self._queue.now)
            self._runs[attempt.key] = run
        finally:
            self._changed()

    @property
    def is_busy(self) -> bool:
        return self._plan is not None or self._quiet is not None

    def reserve(self, attempt: Attempt, run: Run) -> int | None:
        """Reserves blocks for KV that will arrive; see the scheduler."""
        self._catch_up()
        try:
            needed = self.scheduler.reserve(attempt, self._queue.now)
            if needed is not None:
                self._runs[attempt.key] = run
        finally:
            self._changed()
        return needed

    def admit(self, attempt: Attempt) -> None:
        """Starts a reserved attempt whose KV is complete; prefill sampled its first token."""
        self._catch_up()
        key = SequenceKey(attempt.request_id, 0, attempt.attempt)
        tokens = (ChoiceTokens(key, attempt.position, (TOKEN,)),)
        self.scheduler.admit(attempt.key, tokens, self._queue.now)
        for event in self.scheduler.take_events():
            if isinstance(event, KvComplete):
                self._runs[event.key].started(event.cached_tokens)
        self._changed()

    def _free_blocks(self, counted: int) -> int:
        """Does not count blocks taken by quiet steps that have ended by now."""
        quiet = self._quiet
        if quiet is not None:
            steps = quiet.cadence.done(self._queue.now)
            if steps < quiet.steps:
                return counted - self.scheduler.blocks_grown(quiet.rows, steps + 1)
        return counted

    def _catch_up(self) -> None:
        """Applies the quiet steps that have ended, before a call from outside."""
        quiet = self._quiet
        if quiet is not None:
            steps = quiet.cadence.done(self._queue.now)
            if steps < quiet.steps:
                self._take(quiet, steps, begun=True)

    def _changed(self) -> None:
        """Continues after a call from outside: a step in progress continues; so do the quiet steps
        after it if nothing changed."""
        self._reporter.news()
        quiet = self._quiet
        if quiet is None:
            if self._plan is None:
                self._go_on()
            return
        more = self.scheduler.quiet_steps()
        if self.scheduler.num_rows != len(quiet.rows):
            more = 1
        self._run_quietly(_Quiet(quiet.cadence, max(1, more), quiet.rows, True))

    def _go_on(self) -> None:
        """Begins the next step; none is in progress."""
        now, speed = self._queue.now, self.facts.speed
        steps = self.scheduler.quiet_steps() if self._skip else 0
        if steps:
            rows = self.scheduler.rows
            context = sum(one.num_computed_tokens for one in rows)
            first_s = speed.decode_s(len(rows), context)
            cadence = Cadence(now, first_s, len(rows) * speed.context_s)
            self._run_quietly(_Quiet(cadence, steps, rows, False))
            return
        before = self._used
        plan = self.scheduler.plan(now)
        self._deliver(self.scheduler.take_events())
        if plan is None:
            return
        self._plan = plan
        work = plan.work
        seconds = speed.decode_s(work.rows, work.context)
        seconds += work.drafts * (self.facts.draft_s or speed.row_s)
        if work.prefill:
            seconds += speed.prefill_step_s + prefill_s(speed, plan, work.rows)
        self._queue.at(now + seconds, self._finish, plan, seconds, before, order=STEP_ENDS)

    def _finish(self, plan: StepPlan, seconds: float, before: int) -> None:
        self._plan = None
        work = plan.work
        self.use.ran(seconds, 1, work.rows, work.prefill, before, self._used)
        self.use.drafts += work.drafts
        if self.scheduler.speculation is not None:
            self.scheduler.observe(plan, seconds)
        self._deliver(self.scheduler.apply(made_up(plan), self._queue.now))
        if work.prefill:
            self._reporter.news()
        self._go_on()

    def _run_quietly(self, quiet: _Quiet) -> None:
        self._quiet = quiet
        self._queue.at(quiet.cadence.end(quiet.steps), self._quiet_ends, quiet, order=STEP_ENDS)

    def _quiet_ends(self, quiet: _Quiet) -> None:
        if quiet is self._quiet:
            self._take(quiet, quiet.steps, begun=False)
            self._quiet = None
            self._go_on()

    def _take(self, quiet: _Quiet, steps: int, *, begun: bool) -> None:
        """Applies the first `steps` quiet steps and stores the rest of them."""
        cadence, rows, before = quiet.cadence, quiet.rows, self._used
        self.scheduler.skip(rows, steps, begun=begun)
        self._quiet = _Quiet(cadence.after(steps), quiet.steps - steps, rows, begun)
        if not steps:
            return
        first, last = cadence.end(1), cadence.end(steps)
        self.use.ran(last - cadence.began, steps, steps * len(rows), 0, before, self._used)
        between = of_steps(cadence, 1, steps)
        for one in rows:
            run = self._runs[one.attempt.key]
            run.record.many(first + self._hop_s, last + self._hop_s, steps, between)

    def _deliver(self, events: list[Event]) -> None:
        now = self._queue.now + self._hop_s
        for event in events:
            match event:
                case NewTokens(tokens):
                    for part in tokens:
                        key = AttemptKey(part.key.request_id, part.key.attempt)
                        run = self._runs[key]
                        for _ in part.token_ids:
                            run.record.token(now)
                        self.use.saved_steps += part.saved_steps
                        if part.finish_reason is not None:
                            del self._runs[key]
                            run.ended()
                            self._reporter.news()
                case KvComplete(key):
                    self._runs[key].started(event.cached_tokens)
                case AttemptFailed(key, _, error):
                    self._runs.pop(key).failed(error)
                case _:
                    pass
