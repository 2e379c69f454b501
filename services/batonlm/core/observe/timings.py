"""A histogram of durations. It reads no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Durations:
    """A histogram. One thread writes it; other threads may read it."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        """counts[i] is the number of durations above bound i - 1 and up to bound i; the last has no
        upper bound. total_s: the sum of all durations."""
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


def together(parts: Iterable[Durations]) -> Durations:
    """Returns the sum of several histograms."""
    found = Durations()
    for each in parts:
        found.counts = [a + b for a, b in zip(found.counts, each.counts, strict=True)]
        found.total_s += each.total_s
    return found
