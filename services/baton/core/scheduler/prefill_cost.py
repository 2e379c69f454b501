"""PrefillCost, what prefilling so many positions takes; knows no clock, only what it is told.

Every step with prefill teaches a + b * positions + c * reads, where a read is one position that a
computed one attends to: attention grows with the square of a prompt's length, all else does not.
Reads count from NEAR on. What short prompts take then teaches nothing about that square: guessed
from differences as small as theirs, it would come out for a long prompt as anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.scheduler.plan import Chunk
from baton.core.scheduler.regression import Regression

NEAR = 512
"""Positions that every one may attend to for nothing: that is part of what it takes itself."""

WARM_UP = 2
"""First steps that teach nothing: they take longer than any later one, and a worker that is taken
for slow may never be given the work that would show otherwise."""


class PrefillCost:
    """All times are seconds. What was never seen counts as costing nothing."""

    def __init__(self) -> None:
        self._fit = Regression(3)
        self._warming = WARM_UP

    @property
    def curve(self) -> tuple[float, float, float]:
        """Seconds of a step for itself, for a position and for a read. All 0: nothing is known."""
        step_s, position_s, read_s = self._fit.weights
        return step_s, position_s, read_s

    def observe(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Computing these chunks in one step took so long, or added so much to it."""
        positions = num_reads = 0
        for chunk in chunks:
            positions += len(chunk.token_ids)
            num_reads += reads(chunk.first_position, chunk.end_position)
        if self._warming and positions:
            self._warming -= 1
        elif positions:
            self._fit.observe((1.0, float(positions), float(num_reads)), seconds)


def reads(first: int, end: int) -> int:
    """What positions from `first` up to before `end` attend to beyond NEAR others. Position n
    attends to n + 1."""
    far, from_far = max(0, end - NEAR), max(0, first - NEAR)
    return (far * (far + 1) - from_far * (from_far + 1)) // 2
