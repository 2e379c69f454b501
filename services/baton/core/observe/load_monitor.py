"""How far apart a stream's events are kept while a process has no time for one a token.

What an event costs hardly depends on how many tokens are in it. With time to spare every token goes
out as it comes; without, waiting a little makes one event of several.
"""

from __future__ import annotations

FIRST_S = 0.05
"""Less apart than this, hardly two tokens of a stream meet."""

LONGEST_S = 1.0
"""A reader notices more."""

_RELIEF = 0.75
"""Busy below this share of the limit, events come closer together: not at once below it, for the
limit is where they belong."""

_MOST_CLOSER = 10.0
"""Times, at once."""


class LoadMonitor:
    """limit: how busy the process may be before it saves events, in cores."""

    def __init__(self, limit: float) -> None:
        self.interval_s = 0.0
        """Least time between two events of a stream; 0: they come as they come."""
        self._limit = limit

    def observe(self, busy: float) -> None:
        """Told at even distances: cores that the process has used since."""
        if busy > self._limit:
            self.interval_s = min(LONGEST_S, max(FIRST_S, 2 * self.interval_s))
        elif busy < _RELIEF * self._limit:
            # As close as makes it about as busy as that, were events all that it is busy with: then
            # what made it busy is forgotten as soon as it is over, and never overshot.
            closer = self.interval_s * max(busy / (_RELIEF * self._limit), 1 / _MOST_CLOSER)
            self.interval_s = closer if closer >= FIRST_S else 0.0
