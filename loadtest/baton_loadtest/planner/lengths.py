"""Lengths, how long prompts or outputs are, from a mean and a 95th percentile.

Taken as log-normal, which real chat, code and agent traffic resembles: many short, few very long.
What grows with a length's square depends on the few, so a mean alone would flatter a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, isfinite, log, sqrt
from statistics import NormalDist, fmean

from baton.core.errors import InvalidArgument

_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
MOST_SPREAD = exp(_P95 * _P95 / 2)
"""A log-normal's 95th percentile is at most so many times its mean."""

_PARTS = 400


@dataclass(frozen=True)
class Lengths:
    """Tokens. Raises InvalidArgument naming `what` for what no such lengths have."""

    mean: float
    p95: float
    what: str = "lengths"

    def __post_init__(self) -> None:
        if not (isfinite(self.mean) and isfinite(self.p95) and self.mean >= 1):
            raise InvalidArgument("the mean must be at least one token", field=self.what)
        if self.p95 < self.mean:
            raise InvalidArgument("the 95th percentile is below the mean", field=self.what)
        if self.p95 > MOST_SPREAD * self.mean:
            raise InvalidArgument(
                f"the 95th percentile is more than {MOST_SPREAD:.2f} times the mean: a few are so "
                "long that they are better planned apart",
                field=self.what,
            )

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithm; 0 where all are equally long."""
        return _P95 - sqrt(max(0.0, _P95 * _P95 - 2 * log(self.p95 / self.mean)))

    @property
    def weighted_mean(self) -> float:
        """Of the length that a token picked at random belongs to: E[n²] / E[n]."""
        return self.mean * exp(self.spread**2)

    @cached_property
    def points(self) -> tuple[int, ...]:
        """Lengths that are equally likely, in order: the mean of each part of the distribution, so
        that they have its mean, but for rounding, and all but the end of its tail."""
        if not self.spread:
            return (round(self.mean),)
        # What a log-normal's shorter lengths add to its mean is normal again, moved by its spread.
        ends = (_NORMAL.inv_cdf(part / _PARTS) for part in range(1, _PARTS))
        below = [0.0, *(_NORMAL.cdf(end - self.spread) for end in ends), 1.0]
        shares = (upper - lower for lower, upper in pairwise(below))
        return tuple(max(1, round(share * _PARTS * self.mean)) for share in shares)

    def average(self, value: Callable[[int], float]) -> float:
        """Of what a length takes."""
        return fmean(value(length) for length in self.points)
