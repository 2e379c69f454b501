"""PrefillWorker, core's prefill scheduler with steps that take as long as its speed says."""

from __future__ import annotations

from baton.core.request.attempt import Attempt, AttemptKey
from baton.core.request.model import ModelDescription
from baton.core.routing.load import WorkerSpeed
from baton.core.scheduler.events import AttemptFailed, Computed, Event, FirstTokens, Planned
from baton.core.scheduler.plan import SampledToken, StepPlan, StepResult
from baton.core.scheduler.step_cost import reads
from baton_loadtest.simulator.intake import TOKEN, CountingScheduler
from baton_loadtest.simulator.queue import STEP_ENDS, EventQueue
from baton_loadtest.simulator.reports import Tell
from baton_loadtest.simulator.runs import Run
from baton_loadtest.simulator.settings import Delays, WorkerFacts
from baton_loadtest.simulator.worker import SimWorker


class PrefillWorker(SimWorker):
    """receivers: decode workers that share its pool."""

    def __init__(
        self,
        number: int,
        facts: WorkerFacts,
        model: ModelDescription,
        delays: Delays,
        queue: EventQueue,
        receivers: int,
        tell: Tell,
    ) -> None:
        super().__init__(number, facts, delays, queue, tell)
        self.scheduler: CountingScheduler = CountingScheduler(
            self.pool, facts.prefill_policy(), model
        )
        self.scheduler.live_receivers = receivers
        self._running = False
        self._wake: float | None = None
        self._report()

    def add(self, attempt: Attempt, run: Run, *, keep: bool, receiver: str) -> None:
        """Raises what the scheduler does."""
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
        """Its KV was collected, or nobody wants it any more."""
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
    """Seconds of a step that only prefills."""
    return speed.prefill_step_s + prefill_s(speed, plan, 0)


def prefill_s(speed: WorkerSpeed, plan: StepPlan, first: int) -> float:
    """What a step's chunks from the first one on take, but for the step itself."""
    positions = num_reads = 0
    for chunk in plan.chunks[first:]:
        positions += len(chunk.token_ids)
        num_reads += reads(chunk.first_position, chunk.end_position)
    return positions * speed.prefill_position_s + num_reads * speed.prefill_read_s


def made_up(plan: StepPlan) -> StepResult:
    """A token for every sample."""
    tokens = [
        SampledToken(row.sequence_id, row.choice, TOKEN)
        for chunk in plan.chunks
        for row in chunk.samples
    ]
    return StepResult(plan.step, tuple(tokens))
