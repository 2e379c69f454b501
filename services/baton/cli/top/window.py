"""Rates and quantiles of the last seconds of what one process told; scrapes nothing, has no clock.

A counter that is lower than before began anew, and so did all of a process that was started anew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from baton.cli.scrape import total

Samples = Mapping[str, float]
"""Values by name and labels, as /metrics has them."""

STARTED = "process_start_time_seconds"


class Window:
    """Readings of one process, the newest at most `length_s` after the oldest but one: it reaches
    back at least that far once there are enough."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._readings: deque[tuple[float, Samples]] = deque()

    def add(self, at: float, samples: Samples) -> None:
        """at: a reading of a clock that never goes back, in seconds."""
        self._readings.append((at, samples))
        while len(self._readings) > 2 and at - self._readings[1][0] >= self._length_s:
            self._readings.popleft()

    @property
    def seconds(self) -> float:
        """Between the first and the last reading."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def value(self, name: str, *labels: str) -> float:
        """The sum of a gauge's samples with these labels, as last read; 0 of none."""
        return total(self._readings[-1][1], name, *labels) if self._readings else 0.0

    def increase(self, name: str, *labels: str) -> float:
        """By how much a counter's samples with these labels grew, all together."""
        return sum(
            grown
            for sample, grown in self._grown(name).items()
            if all(label in sample for label in labels)
        )

    def rate(self, name: str, *labels: str) -> float:
        """As `increase`, a second."""
        return self.increase(name, *labels) / self.seconds if self.seconds > 0 else 0.0

    def buckets(self, name: str) -> Counter[float]:
        """By how much each bucket of a histogram grew, by its upper bound."""
        found = Counter[float]()
        for sample, grown in self._grown(f"{name}_bucket").items():
            bound = sample.partition('le="')[2].partition('"')[0]
            found[float(bound)] += round(grown)
        return found

    def _grown(self, name: str) -> dict[str, float]:
        grown: dict[str, float] = {}
        for (_, before), (_, after) in pairwise(self._readings):
            anew = before.get(STARTED) != after.get(STARTED)
            for sample, value in after.items():
                if sample.partition("{")[0] == name:
                    # What was not there had never happened.
                    was = 0.0 if anew else before.get(sample, 0.0)
                    grown[sample] = grown.get(sample, 0.0) + value - (was if was <= value else 0.0)
        return grown


def quantile(buckets: Sequence[Counter[float]], share: float) -> float | None:
    """Of the histograms together, as Prometheus has it: within its bucket a value is as likely here
    as there. None when nothing was counted; beyond the last bound, that bound."""
    together = Counter[float]()
    for each in buckets:
        together.update(each)
    bounds = sorted(together)
    if not bounds or together[bounds[-1]] <= 0:
        return None
    rank = share * together[bounds[-1]]
    below, lower = 0.0, 0.0
    for bound in bounds:
        count = together[bound]
        if count >= rank and count > below:
            if bound == float("inf"):
                break
            return lower + (bound - lower) * (rank - below) / (count - below)
        below = count
        lower = bound if bound != float("inf") else lower
    return lower
