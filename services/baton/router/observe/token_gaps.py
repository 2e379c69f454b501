"""TokenGaps, how long a client waits between tokens, as a router sees them; reads no clock.

Tokens that come in one message share the time since the one before them: a client that is told of
several at once waited for each of them that long on average. What a request waits while it goes on
elsewhere counts like any other gap, and the first token does not count.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from baton.core.observe.timings import Timings


class TokenGaps:
    """Of one request. logs: the output of each choice. times: of all requests."""

    def __init__(self, logs: Sequence[Sized], times: Timings) -> None:
        self._logs = logs
        self._times = times
        self._last: dict[int, tuple[int, float]] = {}
        """Of each choice that began: its length, and when it came to that."""

    def came(self, choice: int, now: float) -> None:
        """A choice's log may have grown."""
        length = len(self._logs[choice])
        known, since = self._last.get(choice, (0, now))
        if length <= known:
            return
        self._last[choice] = length, now
        if known:
            gap_s = (now - since) / (length - known)
            for _ in range(length - known):
                self._times.add(gap_s)
