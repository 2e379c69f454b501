"""How many retries a router may add to the load of a fleet that fails.

A token bucket (as in "Handling Overload", Site Reliability Engineering, 2016, and as Finagle has
it): every request that starts pays in a share of a retry, time pays in a little, so that a quiet
router can retry too, and every retry takes one out. What a client has begun to read is no retry:
it is never asked for here.
"""

from __future__ import annotations

import math


class RetryBudget:
    """share: retries per request started. per_s: retries per second besides. most: the largest
    burst. Times in seconds of the caller's monotonic clock.
    """

    def __init__(self, *, share: float, per_s: float, most: float) -> None:
        self._share = share
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = math.inf

    def started(self) -> None:
        """A request begins."""
        self._left = min(self._most, self._left + self._share)

    def take(self, now: float) -> bool:
        """Whether one more retry is allowed; if so, it is taken."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
