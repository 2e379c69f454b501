"""LinkSpeed, what hand-overs take that nothing hides; knows no clock, only what it is told.

Two things are learned: how fast KV chunks are read, and what a hand-over takes from the news that
all is computed to its end, beyond reading what was left then.
"""

from __future__ import annotations

_KEEP = 0.95
"""Weight that evidence keeps with each newer one."""


class LinkSpeed:
    """bytes_per_s, handover_s: 0 until there was a KV chunk, or a whole hand-over. One thread
    writes, others may read."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._tail_s = self._tails = 0.0
        self.bytes_per_s = 0.0
        self.handover_s = 0.0

    def read(self, num_bytes: int, seconds: float) -> None:
        """A KV chunk's bytes came in so many seconds."""
        self._bytes = _KEEP * self._bytes + num_bytes
        self._seconds = _KEEP * self._seconds + seconds
        if self._seconds > 0.0:
            self.bytes_per_s = self._bytes / self._seconds

    def ended(self, bytes_left: int, seconds: float) -> None:
        """A hand-over was complete so long after all was computed; so much was to be read then."""
        known = bytes_left / self.bytes_per_s if self.bytes_per_s else 0.0
        self._tail_s = _KEEP * self._tail_s + max(0.0, seconds - known)
        self._tails = _KEEP * self._tails + 1.0
        self.handover_s = self._tail_s / self._tails
