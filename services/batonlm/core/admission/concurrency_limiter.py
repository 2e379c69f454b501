"""ConcurrencyLimiter: bounds the tokens that one router has with workers before their first token.

Adaptive concurrency by additive increase and multiplicative decrease (Chiu and Jain, "Analysis of
the increase and decrease algorithms for congestion avoidance", 1989), at most one decrease per
round trip as in TCP (RFC 5681, section 3.2). AIMD rather than a latency gradient has two reasons.
Routers that share workers without communicating converge to equal shares. And the time to first
token depends on the prompt's length, while the two signs of congestion do not: a worker that
refuses, and a prompt that waited in a worker's queue for much longer than it was computed.

Before the first sign of congestion the window doubles with every windowful of answers (slow start,
RFC 5681, section 3.1); additive steps alone would leave workers idle for minutes when prompts are
long.

The window grows only while it is used (RFC 7661), because an idle router gets no evidence.
"""

from __future__ import annotations

FIRST_WINDOW = 32768
"""In tokens. The window adapts within a few windowfuls."""

LARGEST_WINDOW = 1 << 24
WINDOW_STEP = 512

DECREASE = 0.7
QUEUED_TOO_LONG = 4.0
"""A multiple of the prompt's own computing time."""

SHORTEST_S = 0.1
"""Shorter waits, in seconds, are no sign of congestion."""


class ConcurrencyLimiter:
    """The window of one router, in tokens. A single input always has room.

    round_trip_s: smoothed seconds from placement to the first token; 0.0 while unknown.
    """

    def __init__(self, limit: float, step: float, most: float) -> None:
        """limit: the initial window. step: the tokens that a full window's answers add to it, which
        is also its smallest size. most: its largest size."""
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
        """Returns tokens, exactly once for each that was taken, whatever the outcome."""
        self.tokens -= tokens

    def answered(self, tokens: int, seconds: float) -> None:
        """A first token arrived, `seconds` after its input was placed. Call it before
        `give_back`."""
        known = self.round_trip_s or seconds
        self.round_trip_s = known + (seconds - known) / 8
        if 2 * self.tokens >= self.limit:
            more = tokens if self._slow_start else self._step * tokens / self.limit
            self.limit = min(self._most, self.limit + more)

    def queued(self, queue_s: float, compute_s: float, now: float) -> None:
        """Reports how long an input waited at its worker and how long its computation took."""
        if queue_s > max(SHORTEST_S, QUEUED_TOO_LONG * compute_s):
            self.congested(now)

    def congested(self, now: float) -> None:
        """A worker refused an input or should have refused it."""
        self._slow_start = False
        if now - self._reduced_at >= self.round_trip_s:
            self._reduced_at = now
            self.limit = max(self._step, DECREASE * self.limit)
