"""EngineLoop, steps one behind the other: plan, submit, collect, apply.

As many steps are in flight as the runner wants. With one, a step is planned when the one before it
is applied. With two, the next step is planned and prepared while one runs, so it may carry tokens
that are not known yet (`plan.PENDING`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import suppress

from batonlm.core.errors import Internal, NotFound
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.plan import ModelRunner, StepPlan, StepResult
from batonlm.core.scheduler.scheduler import Scheduler


class EngineLoop:
    """A scheduler and the runner that computes its steps, for one caller.

    What the runner raises is fatal: memory is in an unknown state.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler):
        self.runner = runner
        self.scheduler = scheduler
        self._in_flight: deque[StepPlan] = deque()
        self._loading = 0
        self._unloading: set[str] = set()
        """Digests of adapters that only running sequences still use."""

    @property
    def in_flight(self) -> int:
        """Steps that are submitted and not collected."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether the runner wants one more step before the oldest is collected."""
        return len(self._in_flight) < self.runner.depth

    def plan(self, now: float) -> StepPlan | None:
        """The next step, which must be submitted; None when nothing can run now."""
        if self._unloading:
            self._unload()
        return self.scheduler.plan(now)

    def begin_loading(self) -> None:
        """The caller is about to let the runner load an adapter, on a thread of its own; no memory
        of adapters is freed until `end_loading`, because it may be what is being loaded."""
        self._loading += 1

    def end_loading(self) -> None:
        self._loading -= 1

    def add_adapter(self, digest: str) -> None:
        """New attempts may name an adapter that the runner has loaded."""
        self._unloading.discard(digest)
        self.scheduler.adapters.pop(digest, None)
        self.scheduler.adapters[digest] = None

    def drop_adapter(self, digest: str) -> None:
        """New attempts may not name it any more. The runner frees it before the next step of which
        no sequence uses it."""
        self.scheduler.adapters.pop(digest, None)
        self._unloading.add(digest)

    def evict_adapter(self, digests: Collection[str]) -> str:
        """Frees the one of these adapters that no sequence uses and that none named for the longest
        time. Returns it, or "" where there is none, or one is being loaded."""
        for digest in self.scheduler.adapters if not self._loading else ():
            if digest in digests and not self.scheduler.uses_adapter(digest):
                del self.scheduler.adapters[digest]
                self.runner.unload_adapter(digest)
                return digest
        return ""

    def _unload(self) -> None:
        if self._loading:
            return
        for digest in [d for d in self._unloading if not self.scheduler.uses_adapter(d)]:
            self._unloading.discard(digest)
            # The runner may never have loaded it, when loading failed.
            with suppress(NotFound):
                self.runner.unload_adapter(digest)

    def submit(self, plan: StepPlan) -> None:
        """Starts a step. Raises Internal when there is no room."""
        if not self.has_room:
            raise Internal(f"step {plan.step} is one too many in flight")
        self._in_flight.append(plan)
        self.runner.submit(plan)

    def collect(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest step in flight. Its result must be applied before the next one's."""
        result = self.runner.collect()
        plan = self._in_flight.popleft()
        if plan.step != result.step:
            raise Internal(f"step {result.step} ended before step {plan.step}")
        return plan, result

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Takes a step's result. A fault of one sequence ends that sequence, nothing else."""
        return self.scheduler.apply(result, now)

    def step(self, now: float) -> list[Event]:
        """Submits what there is room for, ends at most one step, and returns all that happened."""
        while self.has_room and (plan := self.plan(now)) is not None:
            self.submit(plan)
        events = self.scheduler.take_events()
        if self._in_flight:
            events += self.apply(self.collect()[1], now)
        return events

    def idle_check(self) -> None:
        """Raises InvariantBroken when the books disagree."""
        self.scheduler.check()
