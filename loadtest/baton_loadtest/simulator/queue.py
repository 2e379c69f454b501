"""EventQueue, virtual time and what happens when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

STEP_ENDS, ANYTHING, IDLE = 0, 1, 2
"""Of two things at one time the end of a step comes first: what arrives with it meets a worker that
is done. Last comes what happens again and again while nothing else does. Within one class, what was
said first comes first."""


class EventQueue:
    """now: in seconds, from 0. Never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time: float, do: Callable[..., None], *args: Any, order: int = ANYTHING) -> None:
        """Calls do(*args) at a time, or now where that is over."""
        self._number += 1
        heappush(self._heap, (max(time, self.now), order, self._number, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do that anybody waits for."""
        return all(order == IDLE for _, order, *_ in self._heap)

    def run(self, until: float) -> bool:
        """Until nothing is left to do, or a time is reached. Whether everything was done."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, _, do, args = heappop(heap)
            self.num_done += 1
            do(*args)
        return not heap
