"""A clock of the time in which this process could see what others send it.

A process that is stopped (SIGSTOP, a frozen container, a suspended machine) or gets no CPU sees
nothing for a while and then, first of all, that its timers are due: what was sent to it meanwhile
is read after them. Whoever judges a peer's silence by the time that has passed takes its own
absence for the peer's. On this clock such a gap is half a second, however long it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds, monotonic."""

TICK_S = 0.25
LONGEST_TURN_S = 0.5
"""What two ticks are apart counts up to this much. It has to be far below the silence after which
a peer counts as dead, and above what a busy event loop takes to come round."""


class AwakeClock:
    """A `Clock` of one event loop; it goes between `start` and `stop`."""

    def __init__(self, clock: Clock) -> None:
        """clock: the event loop's own time."""
        self.stalls = 0
        """How often the loop did not come round for longer than LONGEST_TURN_S."""
        self.stalled_s = 0.0
        """What is missing on this clock, in all."""
        self._clock = clock
        self._ticked_at = clock()
        self._awake_s = 0.0
        """At the last tick."""
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> float:
        return self._awake_s + min(self._clock() - self._ticked_at, LONGEST_TURN_S)

    def start(self) -> None:
        """Runs on the running loop from now on."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._keep_ticking)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def tick(self) -> None:
        """The loop came round."""
        now = self._clock()
        passed = now - self._ticked_at
        self._awake_s += min(passed, LONGEST_TURN_S)
        self._ticked_at = now
        if passed > LONGEST_TURN_S:
            self.stalls += 1
            self.stalled_s += passed - LONGEST_TURN_S
            log.info("the event loop did not come round for %.1f s", passed)

    def _keep_ticking(self) -> None:
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._keep_ticking)
