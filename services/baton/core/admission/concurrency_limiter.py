"""ConcurrencyLimiter, how many tokens one router may have with workers before their first token
comes.

Adaptive concurrency by additive increase and multiplicative decrease (Chiu and Jain, "Analysis of
the increase and decrease algorithms for congestion avoidance", 1989), at most one decrease per
round trip as in TCP (RFC 5681, section 3.2). AIMD and not a gradient on latency, because routers
that share workers without talking to each other then converge to equal shares, and because a first
token's time depends on the prompt's length, while its two signs of congestion do not: a worker that
refuses, and a prompt that waited in a worker's queue for much longer than it then computed.

Before the first such sign the window doubles with every windowful of answers (slow start, RFC 5681,
section 3.1): by steps alone a router of long prompts would leave its workers idle for minutes.

The window grows only while it is used (RFC 7661): an idle router learns nothing.
"""

from __future__ import annotations

FIRST_WINDOW = 32768
"""Tokens; what it should be is learnt within a few windowfuls."""

LARGEST_WINDOW = 1 << 24
WINDOW_STEP = 512

DECREASE = 0.7
QUEUED_TOO_LONG = 4.0
"""Times its own computing time."""

SHORTEST_S = 0.1
"""Waiting for less is no sign of anything."""


class ConcurrencyLimiter:
    """limit: tokens at the start. step: tokens that a full window's answers add to it, and its
    smallest size. One input alone always has room. round_trip_s: from a place to the first token,
    smoothed; 0.0 while not known.
    """

    def __init__(self, limit: float, step: float, most: float) -> None:
        self.limit = limit
        self.tokens = 0
        self.round_trip_s = 0.0
        self._step = step
        self._most = most
        self._slow_start = True
        self._reduced_at = float("-inf")

    def has_room(self, tokens: int) -> bool:
        return not self.tokens or self.tokens + tokens <= self.limit

    def take(self, tokens: int) -> None:
        self.tokens += tokens

    def give_back(self, tokens: int) -> None:
        """Each that was taken, once, whatever became of it."""
        self.tokens -= tokens

    def answered(self, tokens: int, seconds: float) -> None:
        """A first token came, so many seconds after its input was placed; called before
        `give_back`."""
        known = self.round_trip_s or seconds
        self.round_trip_s = known + (seconds - known) / 8
        if 2 * self.tokens >= self.limit:
            more = tokens if self._slow_start else self._step * tokens / self.limit
            self.limit = min(self._most, self.limit + more)

    def queued(self, queue_s: float, compute_s: float, now: float) -> None:
        """How long an input waited at its worker, and how long it then took."""
        if queue_s > max(SHORTEST_S, QUEUED_TOO_LONG * compute_s):
            self.congested(now)

    def congested(self, now: float) -> None:
        """A worker refused, or should have."""
        self._slow_start = False
        if now - self._reduced_at >= self.round_trip_s:
            self._reduced_at = now
            self.limit = max(self._step, DECREASE * self.limit)
