"""TokenBucket, what may be used per second and saved up to a burst; knows no clock and no tenant.

The token bucket of RFC 2215 (section 2.3), with two additions: what was taken and not used can be
given back, and an amount larger than the whole bucket passes when the bucket is full and leaves a
debt, so that nothing is refused for ever. Times are readings of one clock, in seconds.
"""

from __future__ import annotations


class TokenBucket:
    """rate: units a second. burst: units it holds at most. It starts full."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def resize(self, rate: float, burst: float, now: float) -> None:
        """From now on another rate and burst. What is in it stays, as far as it fits."""
        self._fill(now)
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst)

    def level(self, now: float) -> float:
        """What could be taken now; negative: a debt."""
        self._fill(now)
        return self._level

    def is_full(self, now: float) -> bool:
        return self.level(now) >= self._burst

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until an amount could be taken, if nobody else took any; 0.0: now."""
        missing = min(amount, self._burst) - self.level(now)
        return max(0.0, missing / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Whether there is enough is the caller's to ask, with `wait_s`."""
        self._fill(now)
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and not used; negative: what was used and not taken."""
        self._fill(now)
        self._level = min(self._burst, self._level + amount)

    def _fill(self, now: float) -> None:
        # A clock that was read a little earlier by somebody else takes nothing away.
        passed = max(0.0, now - self._at)
        self._level = min(self._burst, self._level + passed * self._rate)
        self._at = max(self._at, now)
