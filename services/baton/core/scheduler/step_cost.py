"""StepCost, how long a step will probably take; knows no clock, only what it is told.

A best guess, unlike `StepTimes`, which is pessimistic for those who watch whether a worker lives.
Steps without prefill teach a + b * rows + c * context. Steps with prefill teach only the seconds
that one prefilled position adds to that, so a long time without any forgets nothing about it. The
growth of a position's cost with its context is not modelled: it is averaged over recent chunks
(`PrefillCost` has it, for those who look further ahead than one step).
"""

from __future__ import annotations

from baton.core.scheduler.plan import StepWork
from baton.core.scheduler.regression import Regression

_RENEW = 0.2
"""Weight of the newest step among those with prefill."""


class StepCost:
    """All times are seconds. Until a kind of work was seen it counts as costing nothing."""

    def __init__(self) -> None:
        self._decode = Regression(3)
        self.prefill_position_s: float | None = None
        """Of one prefilled position; None until there was one."""

    @property
    def curve(self) -> tuple[float, float, float]:
        """Seconds of a step without prefill: for itself, for a row, and for a row's position."""
        step_s, row_s, position_s = self._decode.weights
        return step_s, row_s, position_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if work.prefill:
            added = self.added(work, seconds) / work.prefill
            known = self.prefill_position_s
            self.prefill_position_s = added if known is None else known + _RENEW * (added - known)
        else:
            self._decode.observe(_terms(work), seconds)

    def added(self, work: StepWork, seconds: float) -> float:
        """What a step's prefill added to the time of its rows."""
        return max(0.0, seconds - self._decode.predict(_terms(work)))

    def predict(self, work: StepWork) -> float:
        """Seconds that a step with this work will take."""
        return self._decode.predict(_terms(work)) + work.prefill * (self.prefill_position_s or 0.0)

    def most_prefill(self, rows: int, context: int, within_s: float) -> int | None:
        """How many positions can be prefilled next to these rows within a time, at least 0; None
        when that is not known."""
        if not self.prefill_position_s:
            return None
        left = within_s - self.predict(StepWork(rows, context))
        return max(0, int(left / self.prefill_position_s))


def _terms(work: StepWork) -> tuple[float, float, float]:
    return 1.0, float(work.rows), float(work.context)
