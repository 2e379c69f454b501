"""When requests are due: Poisson, constant, bursts, ramps, or a trace's own times; draws nothing
else and knows no clock.

Times are in seconds from the beginning. Rates are per second.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.core.errors import InvalidArgument

MOST = 10_000_000
"""Arrivals of one run: what is recorded of them has to fit into memory."""


class Kind(StrEnum):
    CONSTANT = "constant"
    POISSON = "poisson"
    BURSTS = "bursts"
    RAMP = "ramp"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """rate: at the beginning, and outside bursts. to_rate: at the end of a ramp. burst_rate: for
    the first burst_s of every period_s. All kinds but constant are Poisson processes.

    Raises InvalidArgument naming the field.
    """

    kind: Kind
    rate: float
    seconds: float
    to_rate: float = 0.0
    burst_rate: float = 0.0
    burst_s: float = 0.0
    period_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", *_NEEDS[self.kind]):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument("must be a number above 0", field=f"arrivals.{name}")
        if self.kind is Kind.BURSTS and self.burst_s > self.period_s:
            raise InvalidArgument("must be at most period_s", field="arrivals.burst_s")
        if self.mean_rate * self.seconds > MOST:
            raise InvalidArgument(f"would be more than {MOST:,} arrivals", field="arrivals.rate")

    @property
    def mean_rate(self) -> float:
        """Over all of the time."""
        if self.kind is Kind.RAMP:
            return (self.rate + self.to_rate) / 2
        if self.kind is Kind.BURSTS:
            periods, rest = divmod(self.seconds, self.period_s)
            burst = (periods * self.burst_s + min(rest, self.burst_s)) / self.seconds
            return self.rate + (self.burst_rate - self.rate) * burst
        return self.rate

    @property
    def highest_rate(self) -> float:
        return max(self.rate, self.to_rate, self.burst_rate)

    def scaled(self, factor: float) -> Arrivals:
        """So many times as many arrivals, in the same time and shape."""
        return replace(
            self,
            rate=self.rate * factor,
            to_rate=self.to_rate * factor,
            burst_rate=self.burst_rate * factor,
        )

    def rate_at(self, at: float) -> float:
        if self.kind is Kind.RAMP:
            return self.rate + (self.to_rate - self.rate) * at / self.seconds
        if self.kind is Kind.BURSTS and at % self.period_s < self.burst_s:
            return self.burst_rate
        return self.rate

    def times(self, draw: random.Random) -> list[float]:
        """In order, from 0 to below `seconds`."""
        if self.kind is Kind.CONSTANT:
            count = int(self.rate * self.seconds)
            return [at for n in range(count + 1) if (at := n / self.rate) < self.seconds]
        found = []
        highest = self.highest_rate
        at = draw.expovariate(highest)
        while at < self.seconds:
            # Thinning: a process of the highest rate, of which each arrival stays by its chance.
            if self.rate_at(at) >= highest * draw.random():
                found.append(at)
            at += draw.expovariate(highest)
        return found


_NEEDS: dict[Kind, tuple[str, ...]] = {
    Kind.CONSTANT: (),
    Kind.POISSON: (),
    Kind.RAMP: ("to_rate",),
    Kind.BURSTS: ("burst_rate", "burst_s", "period_s"),
}


def replayed(times: Iterable[float], speed: float) -> list[float]:
    """A trace's times, counted from its first one and passing `speed` times as fast, in order."""
    ordered = sorted(times)
    return [(at - ordered[0]) / speed for at in ordered]
