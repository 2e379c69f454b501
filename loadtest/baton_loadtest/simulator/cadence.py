"""Cadence, the times at which a row of quiet decode steps ends.

While the same sequences run, each step reads as many positions more than the one before as there
are sequences, so steps grow longer by the same time each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Cadence:
    """began: when the first step began. first_s: how long it takes, above 0; more_s: by how much
    each one takes longer than the one before."""

    began: float
    first_s: float
    more_s: float

    def end(self, steps: int) -> float:
        """When so many steps are done."""
        return self.began + steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def length(self, step: int) -> float:
        """Of a step, from 0."""
        return self.first_s + step * self.more_s

    def done(self, now: float) -> int:
        """How many steps have ended by a time."""
        passed = now - self.began
        if self.more_s > 0.0:
            half = self.first_s - self.more_s / 2
            found = (sqrt(half * half + 2 * self.more_s * max(0.0, passed)) - half) / self.more_s
        else:
            found = passed / self.first_s
        steps = max(0, int(found))
        # By the same rounding as `end`, which is what counts.
        while self.end(steps + 1) <= now:
            steps += 1
        while steps and self.end(steps) > now:
            steps -= 1
        return steps

    def after(self, steps: int) -> Cadence:
        """The steps behind so many."""
        return Cadence(self.end(steps), self.length(steps), self.more_s)
