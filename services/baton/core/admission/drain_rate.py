"""DrainRate, how fast a queue is emptied, as it was seen.

Only time in which somebody waited counts, and only who had to wait: an idle fleet takes a burst at
once, which says nothing of how fast it works. Older sightings are forgotten exponentially.
"""

from __future__ import annotations

import math

FORGET_S = 5.0
"""After so much time with a queue a sighting weighs 1/e."""

ENOUGH_S = 0.25
"""With less than this seen, nothing is said."""

DOUBT = 2.0
"""A foretold wait may turn out so many times shorter: entries leave in the batches of whoever takes
them, and what one of them comes to is a guess."""


class DrainRate:
    """Times are readings of one clock, in seconds."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._next = 0.0
        self._since: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known. One that is about to leave counts as if it did now: that nobody has left
        for a while says how long it takes at least, and not that it takes for ever."""
        if self._busy_s < ENOUGH_S:
            return None
        return (self._tokens + self._next) / self._busy_s

    def wait_s(self, tokens: float) -> float:
        """How long until so many tokens have left. 0.0 while nothing is known."""
        rate = self.tokens_per_s
        if rate is None or tokens <= 0:
            return 0.0
        return tokens / rate if rate > 0 else math.inf

    def least_wait_s(self, tokens: float) -> float:
        """How long at least, as far as so few sightings can tell."""
        return self.wait_s(tokens) / DOUBT

    def waiting(self, now: float, next_tokens: float | None) -> None:
        """Whether anybody waits, from now on, and what the next one comes to, about; None: nobody
        waits."""
        if self._since is not None and now > self._since:
            passed = now - self._since
            keep = math.exp(-passed / FORGET_S)
            self._tokens *= keep
            self._busy_s = self._busy_s * keep + passed
        self._since = None if next_tokens is None else now
        if next_tokens is not None:
            self._next = next_tokens

    def left(self, tokens: float, now: float) -> None:
        """One that had to wait goes on."""
        self.waiting(now, self._next)
        self._tokens += tokens
