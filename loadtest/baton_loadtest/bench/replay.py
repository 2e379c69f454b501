"""Runs requests through a scheduler and its block pool with made-up results; computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.core.errors import BatonError
from baton.core.request.attempt import Attempt
from baton.core.scheduler.events import AttemptFailed, Event, NewTokens
from baton.core.scheduler.plan import SampledToken, StepPlan, StepResult
from baton.core.scheduler.scheduler import Scheduler

TOKEN = 7
STEP_S = 0.05


def replay(
    scheduler: Scheduler, attempts: Iterable[Attempt], at_once: int
) -> Iterator[tuple[StepPlan, list[Event]]]:
    """Keeps so many sequences inside until all attempts are done. Yields each step's plan with what
    was told when it was applied. Raises BatonError when the scheduler gets stuck."""
    waiting = iter(attempts)
    inside, now = 0, 0.0
    while True:
        while inside < at_once and (following := next(waiting, None)) is not None:
            scheduler.add(following, now)
            inside += len(following.choices)
        plan = scheduler.plan(now)
        if plan is None:
            break
        events = scheduler.apply(made_up(plan), now)
        yield plan, events
        for event in events:
            if isinstance(event, AttemptFailed):
                raise BatonError(event.error.message)
            if isinstance(event, NewTokens):
                inside -= sum(made.finish_reason is not None for made in event.tokens)
        now += STEP_S
    if scheduler.has_work:
        raise BatonError("the scheduler plans nothing and has work")


def made_up(plan: StepPlan) -> StepResult:
    """The same token for every sample."""
    tokens = tuple(
        SampledToken(row.sequence_id, row.choice, TOKEN)
        for chunk in plan.chunks
        for row in chunk.samples
    )
    return StepResult(plan.step, tokens)
