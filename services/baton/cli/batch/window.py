"""Window, how many requests of a batch may be out at a time.

It opens by one for every windowful of answers, and closes by half when the server refuses: who
shares the server with somebody more urgent has less of it, and has it back when they leave
(additive increase, multiplicative decrease).
"""

from __future__ import annotations

FIRST = 4.0
LEAST = 1.0
SHRINK = 0.5


class Window:
    """most: never more than that."""

    def __init__(self, most: int) -> None:
        self.out = 0
        self.not_before = 0.0
        """Reading of the caller's clock until which the server wants to be asked nothing."""
        self._most = float(most)
        self._limit = min(FIRST, self._most)
        self._turn = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def has_room(self, now: float) -> bool:
        return self.out < self.limit and now >= self.not_before

    def enter(self) -> int:
        """A request leaves for the server. Returns its turn, for `refused`."""
        self.out += 1
        return self._turn

    def left(self, *, answered: bool) -> None:
        """One is back; a failure says nothing about room."""
        self.out -= 1
        if answered:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def refused(self, turn: int, again_at: float) -> None:
        """One is back; the server has no room before a time. Those that left before the last cut
        do not cut again: they were refused for the same reason."""
        self.out -= 1
        self.not_before = max(self.not_before, again_at)
        if turn == self._turn:
            self._limit = max(LEAST, self._limit * SHRINK)
            self._turn += 1
