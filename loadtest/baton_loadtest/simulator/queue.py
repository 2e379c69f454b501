"""Virtual time and a queue of events."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

STEP_ENDS, ANYTHING, IDLE = 0, 1, 2
"""The order of events at the same time. Ends of steps are first: an event that arrives at that time
finds the worker free. Periodic events are last. Within a class the order is that of the calls."""


class EventQueue:
    """now: seconds from 0, never decreasing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time: float, do: Callable[..., None], *args: Any, order: int = ANYTHING) -> None:
        """Schedules do(*args) at a time, or now if that is over."""
        self._number += 1
        heappush(self._heap, (max(time, self.now), order, self._number, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    @property
    def is_idle(self) -> bool:
        """Whether only periodic events remain."""
        return all(order == IDLE for _, order, *_ in self._heap)

    def run(self, until: float) -> bool:
        """Runs until no events remain or a time is reached. Returns whether none remain."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, _, do, args = heappop(heap)
            self.num_done += 1
            do(*args)
        return not heap
