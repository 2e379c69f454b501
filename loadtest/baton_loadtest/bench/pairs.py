"""How much more one side of many pairs takes, and how sure that is; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev

from baton.core.errors import InvalidArgument

_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t that 95 % of draws stay within, by degrees of freedom from 1 on."""
MOST_PAIRS = len(_T95) + 1


@dataclass(frozen=True, slots=True)
class Ratio:
    """What a pair's ratio is on average, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Of the first of a pair to the second; both are above 0.

    Of the ratios' logarithms, since one that is twice as large and one that is half as large are
    no difference. Raises InvalidArgument for fewer than two pairs, or more than MOST_PAIRS.
    """
    check_count(len(pairs))
    logs = [log(first / second) for first, second in pairs]
    mean = fmean(logs)
    spread = _T95[len(logs) - 2] * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(mean), exp(mean - spread), exp(mean + spread))


def check_count(pairs: int) -> None:
    """Raises InvalidArgument for so many as `ratio` does not take."""
    if not 2 <= pairs <= MOST_PAIRS:
        raise InvalidArgument(f"must be 2 to {MOST_PAIRS}", field="pairs")
