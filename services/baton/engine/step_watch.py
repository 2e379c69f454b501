"""StepWatch, how long the running step has been running; knows no clock, only what it is told.

Steps in flight run one after the other, so the oldest began when it was submitted or when the one
before it ended, whichever came later. The engine thread tells; any thread may read.
"""

from __future__ import annotations

from collections import deque

from baton.core.scheduler.step_time import StepTimes


class StepWatch:
    """Times are readings of one clock, in seconds."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._waiting: deque[int] = deque()
        self._began: float | None = None
        self.predicted_s = 0.0
        """A pessimistic guess for the running step, or the last one's when none runs."""

    def submitted(self, num_tokens: int, now: float) -> None:
        """A step of so many tokens is about to be submitted."""
        self._waiting.append(num_tokens)
        if len(self._waiting) == 1:
            self._begin(now)

    def collected(self, now: float) -> float:
        """The oldest step has ended. Returns the seconds that it ran."""
        num_tokens, began = self._waiting.popleft(), self._began
        seconds = 0.0 if began is None else now - began
        self._times.observe(num_tokens, seconds)
        self._began = None
        if self._waiting:
            self._begin(now)
        return seconds

    def stop(self) -> None:
        """Nothing runs any more, whatever was submitted."""
        self._waiting.clear()
        self._began = None

    def age_s(self, now: float) -> float:
        """How long the running step has been running; 0 when there is none."""
        began = self._began
        return 0.0 if began is None else now - began

    def _begin(self, now: float) -> None:
        self.predicted_s = self._times.predict(self._waiting[0])
        self._began = now
