"""EngineLoop, one step after the other: plan, run, apply; knows no thread and no clock."""

from __future__ import annotations

from typing import Generic, TypeVar

from baton.core.events import Event
from baton.core.plan import StepPlan, StepResult
from baton.core.ports import ModelRunner
from baton.core.scheduling import Scheduler

SchedulerT = TypeVar("SchedulerT", bound=Scheduler, covariant=True)


class EngineLoop(Generic[SchedulerT]):
    """A scheduler and the runner that computes its steps. Whoever calls it is the only one."""

    def __init__(self, runner: ModelRunner, scheduler: SchedulerT):
        self.runner = runner
        self.scheduler = scheduler

    def plan(self, now: float) -> StepPlan | None:
        """The next step, which `run` must be given; None when nothing can run now."""
        return self.scheduler.plan(now)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes one step to its end. What it raises is fatal: memory is in an unknown state."""
        self.runner.submit(plan)
        return self.runner.collect()

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Takes a step's result. What one sequence did wrong ends that sequence, nothing else."""
        return self.scheduler.apply(result, now)

    def step(self, now: float) -> list[Event]:
        """Runs at most one step and tells all that happened since the last one."""
        plan = self.plan(now)
        events = self.scheduler.take_events()
        if plan is not None:
            events += self.apply(self.run(plan), now)
        return events

    def idle_check(self) -> None:
        """Raises InvariantBroken when the books disagree."""
        self.scheduler.check()
