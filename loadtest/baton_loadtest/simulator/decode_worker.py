"""DecodeWorker, core's decode scheduler with steps that take as long as its speed says.

Quiet steps (see `SkippingScheduler`) are taken as one for as long as nothing comes from outside.
What comes meanwhile is met by a worker that has done the steps which ended by then, with the next
one on its way: as it would have been, had every step been taken by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, SequenceKey
from baton.core.request.model import ModelDescription
from baton.core.scheduler.events import AttemptFailed, Event, KvComplete, NewTokens
from baton.core.scheduler.plan import StepPlan
from baton_loadtest.simulator.cadence import Cadence
from baton_loadtest.simulator.gaps import of_steps
from baton_loadtest.simulator.intake import TOKEN, CountingSequence
from baton_loadtest.simulator.prefill_worker import made_up, prefill_s
from baton_loadtest.simulator.queue import STEP_ENDS, EventQueue
from baton_loadtest.simulator.reports import Tell
from baton_loadtest.simulator.runs import Run
from baton_loadtest.simulator.settings import Delays, WorkerFacts
from baton_loadtest.simulator.skipping import SkippingScheduler
from baton_loadtest.simulator.worker import SimWorker


@dataclass(slots=True, eq=False)
class _Quiet:
    """Quiet steps under way. rows: whose; the first step's blocks are taken if it is begun."""

    cadence: Cadence
    steps: int
    rows: list[CountingSequence]
    begun: bool


class DecodeWorker(SimWorker):
    """skip: whether quiet steps are taken at once."""

    def __init__(
        self,
        number: int,
        facts: WorkerFacts,
        model: ModelDescription,
        delays: Delays,
        queue: EventQueue,
        tell: Tell,
        *,
        skip: bool,
    ) -> None:
        super().__init__(number, facts, delays, queue, tell)
        self.scheduler: SkippingScheduler = SkippingScheduler(
            self.pool, facts.decode_policy(), model
        )
        self._hop_s = delays.hop_s
        self._skip = skip
        self._plan: StepPlan | None = None
        self._quiet: _Quiet | None = None
        self._report()

    def add(self, attempt: Attempt, run: Run) -> None:
        """Its prompt is computed here. Raises what the scheduler does."""
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
        """Blocks for KV that will come, see the scheduler."""
        self._catch_up()
        try:
            needed = self.scheduler.reserve(attempt, self._queue.now)
            if needed is not None:
                self._runs[attempt.key] = run
        finally:
            self._changed()
        return needed

    def admit(self, attempt: Attempt) -> None:
        """The KV of a reserved attempt is complete, its first token was sampled by prefill."""
        self._catch_up()
        key = SequenceKey(attempt.request_id, 0, attempt.attempt)
        tokens = (ChoiceTokens(key, attempt.position, (TOKEN,)),)
        self.scheduler.admit(attempt.key, tokens, self._queue.now)
        for event in self.scheduler.take_events():
            if isinstance(event, KvComplete):
                self._runs[event.key].started(event.cached_tokens)
        self._changed()

    def _free_blocks(self, told: int) -> int:
        """Without those that quiet steps which ended by now have taken."""
        quiet = self._quiet
        if quiet is not None:
            steps = quiet.cadence.done(self._queue.now)
            if steps < quiet.steps:
                return told - self.scheduler.blocks_grown(quiet.rows, steps + 1)
        return told

    def _catch_up(self) -> None:
        """Something comes from outside: takes the quiet steps that are done by now."""
        quiet = self._quiet
        if quiet is not None:
            steps = quiet.cadence.done(self._queue.now)
            if steps < quiet.steps:
                self._take(quiet, steps, begun=True)

    def _changed(self) -> None:
        """After it: a step that has begun goes on; those after it, too, if nothing changed."""
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
        """Nothing runs: begins what comes next."""
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
        if work.prefill:
            seconds += speed.prefill_step_s + prefill_s(speed, plan, work.rows)
        self._queue.at(now + seconds, self._finish, plan, seconds, before, order=STEP_ENDS)

    def _finish(self, plan: StepPlan, seconds: float, before: int) -> None:
        self._plan = None
        work = plan.work
        self.use.ran(seconds, 1, work.rows, work.prefill, before, self._used)
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
        """So many of the quiet steps are done. What is left of them is in its place afterwards."""
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
                    for told in tokens:
                        key = AttemptKey(told.key.request_id, told.key.attempt)
                        run = self._runs[key]
                        run.record.token(now)
                        if told.finish_reason is not None:
                            del self._runs[key]
                            run.ended()
                            self._reporter.news()
                case KvComplete(key):
                    self._runs[key].started(event.cached_tokens)
                case AttemptFailed(key, _, error):
                    self._runs.pop(key).failed(error)
                case _:
                    pass
