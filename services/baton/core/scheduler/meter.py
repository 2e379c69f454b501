"""DecodeMeter, what a decode worker's steps teach about its speed; knows no clock and no queues."""

from __future__ import annotations

from baton.core.routing.speed import WorkerSpeed
from baton.core.scheduler.plan import StepPlan
from baton.core.scheduler.prefill_cost import PrefillCost
from baton.core.scheduler.step_cost import StepCost


class DecodeMeter:
    """cost: for whoever plans the next step. prefill_step_tokens: what a step prefills at most
    beside sequences that run."""

    def __init__(self, prefill_step_tokens: int) -> None:
        self.cost = StepCost()
        self._prefill = PrefillCost()
        self._prefill_step_tokens = prefill_step_tokens

    @property
    def speed(self) -> WorkerSpeed:
        """May be read by any thread."""
        return WorkerSpeed(*self.cost.curve, *self._prefill.curve, self._prefill_step_tokens)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        # What moving blocks takes is told apart, in StepResult.swap_s. Rows of logits, with which a
        # prompt is scored, take time that no other step's positions do.
        if plan.swap_out or plan.swap_in or plan.scores:
            return
        if plan.work.prefill:
            added_s = self.cost.added(plan.work, seconds)
            self._prefill.observe(plan.chunks[plan.work.rows :], added_s)
        self.cost.observe(plan.work, seconds)
