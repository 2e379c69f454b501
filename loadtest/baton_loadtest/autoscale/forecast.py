"""Forecasts arrivals: a daily season, a level with a damped trend, and the error of its own past.

    forecast(t + h) = season of t + h  x  level now      where the season of that time is known
                    = level now + damped trend x h       else

The level is how the last minutes compare with their season. The error is measured: each forecast
is kept until its time has come.
"""

from __future__ import annotations

from collections import deque
from math import sqrt

BUCKET_S = 60.0
"""Arrivals are counted in buckets of this length."""
SLOT_S = 600.0
"""The season is one number for each part of a day of this length."""
DAY_S = 86400.0
LEVEL = 0.3
"""Weight of the newest bucket in the level, and in the error."""
TREND = 0.1
SEASON = 0.4
"""Weight of the newest day in its season."""
DAMPING = 0.9
"""Share of the trend that lasts from one bucket to the next."""
SURE = 1.28
"""Standard deviations of the error that are added: 9 of 10 forecasts are not exceeded."""


class Forecast:
    """Arrivals per second. Call `see` for each bucket, in order."""

    def __init__(self, ahead_s: float) -> None:
        """ahead_s: how far ahead the error is measured."""
        self._ahead = max(1, round(ahead_s / BUCKET_S))
        self._season: dict[int, float] = {}
        self._slot: int | None = None
        self._slot_sum, self._slot_count = 0.0, 0
        self._rate: float | None = None
        self._trend = 0.0
        self._ratio = 1.0
        self._square = 0.0
        self._due: deque[float] = deque()
        """What was forecast for the next `ahead` buckets."""

    def see(self, start_s: float, rate: float) -> None:
        """Takes the arrivals per second of the bucket that began at start_s, on a clock whose days
        begin at multiples of DAY_S."""
        if len(self._due) == self._ahead:
            missed = rate - self._due.popleft()
            self._square += LEVEL * (missed * missed - self._square)
        before = self._rate
        self._rate = rate if before is None else before + LEVEL * (rate - before)
        if before is not None:
            self._trend += TREND * (self._rate - before - self._trend)
        usual = self._season.get(_slot(start_s))
        if usual:
            self._ratio += LEVEL * (rate / usual - self._ratio)
        self._keep(start_s, rate)
        self._due.append(self.at(start_s, self._ahead * BUCKET_S))

    def at(self, now_s: float, ahead_s: float) -> float:
        """Returns the expected arrivals per second at a time ahead; 0 before the first bucket."""
        if self._rate is None:
            return 0.0
        usual = self._season.get(_slot(now_s + ahead_s))
        if usual is not None and self._season.get(_slot(now_s)):
            return max(0.0, usual * self._ratio)
        steps = ahead_s / BUCKET_S
        lasts: float = (1.0 - DAMPING**steps) / (1.0 - DAMPING)
        return max(0.0, self._rate + self._trend * lasts)

    @property
    def error(self) -> float:
        """Standard deviation of past forecasts, in arrivals per second."""
        return sqrt(self._square)

    def most(self, now_s: float, until_s: float) -> float:
        """Returns the rate that is not exceeded until a time ahead, in 9 of 10 cases: the largest
        forecast, and the error."""
        steps = max(1, round(until_s / BUCKET_S))
        return max(self.at(now_s, n * BUCKET_S) for n in range(steps + 1)) + SURE * self.error

    def _keep(self, start_s: float, rate: float) -> None:
        """Adds to the season what is complete of it."""
        slot = _slot(start_s)
        if slot != self._slot:
            if self._slot is not None:
                mean = self._slot_sum / self._slot_count
                known = self._season.get(self._slot, mean)
                self._season[self._slot] = known + SEASON * (mean - known)
            self._slot, self._slot_sum, self._slot_count = slot, 0.0, 0
        self._slot_sum += rate
        self._slot_count += 1


def _slot(time_s: float) -> int:
    return int(time_s % DAY_S // SLOT_S)
