"""Gaps, times between tokens in classes that grow by 2 %; keeps no single one.

Also of many steps at once, by their Cadence.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, exp, log

from baton_loadtest.simulator.cadence import Cadence

GROWTH = log(1.02)
"""Of a class's bounds, so that a quantile is right within 1 %."""

Counts = dict[int, int]


def class_of(seconds: float) -> int:
    """Times of 0 are in the class of a nanosecond."""
    return int(log(max(seconds, 1e-9) / 1e-9) / GROWTH)


def middle(which: int) -> float:
    """Seconds that stand for a class."""
    return 1e-9 * exp((which + 0.5) * GROWTH)


def of_steps(cadence: Cadence, first: int, end: int) -> list[tuple[int, int]]:
    """(class, how many) of the steps from `first` to before `end`."""
    found: list[tuple[int, int]] = []
    while first < end:
        which = class_of(cadence.length(first))
        last = end
        if class_of(cadence.length(end - 1)) != which:
            bound = 1e-9 * exp((which + 1) * GROWTH)
            last = min(end, max(first + 1, ceil((bound - cadence.first_s) / cadence.more_s)))
        found.append((which, last - first))
        first = last
    return found


def merged(many: Iterable[Counts]) -> Counts:
    found: Counts = {}
    for counts in many:
        for which, count in counts.items():
            found[which] = found.get(which, 0) + count
    return found


def quantile(counts: Counts, share: float) -> float:
    """Seconds that this share of all is at most, within 1 %; 0.0 of none."""
    total = sum(counts.values())
    left = min(total - 1, int(share * total))
    for which in sorted(counts):
        left -= counts[which]
        if left < 0:
            return middle(which)
    return 0.0
