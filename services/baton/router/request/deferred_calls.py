"""Does things about when they are due, many together: one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil

TICK_S = 0.05
"""What is due within one is done at its end."""


class DeferredCalls:
    """Of one event loop. There is a timer only while something is to be done."""

    def __init__(self) -> None:
        self._due: dict[int, list[Callable[[], None]]] = {}
        """By the tick at which it is done."""
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when: float, call: Callable[[], None]) -> None:
        """when: on the running loop's clock. call: must neither wait nor raise."""
        self._due.setdefault(ceil(when / TICK_S), []).append(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def close(self) -> None:
        """What is not done yet never is."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time() / TICK_S
        for tick in sorted(tick for tick in self._due if tick <= now):
            for call in self._due.pop(tick):
                call()
        self._timer = loop.call_later(TICK_S, self._tick) if self._due else None
