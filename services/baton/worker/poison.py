"""A worker that dies of a certain prompt, on purpose: how quarantine is tested.

Only a worker that was told so twice (`poison_token`, `allow_poison`) does it.
"""

from __future__ import annotations

import os
import signal

from baton.core.scheduler.loop import EngineLoop, SchedulerT
from baton.core.scheduler.plan import StepPlan
from baton.core.scheduler.ports import ModelRunner


class PoisonedLoop(EngineLoop[SchedulerT]):
    """An engine loop that ends its process, as by a fault of the machine, when a step computes an
    input that begins with the token. Wherever else it stands, it does no harm."""

    def __init__(self, runner: ModelRunner, scheduler: SchedulerT, token_id: int) -> None:
        super().__init__(runner, scheduler)
        self._token_id = token_id

    def submit(self, plan: StepPlan) -> None:
        if any(c.first_position == 0 and c.token_ids[0] == self._token_id for c in plan.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(plan)
