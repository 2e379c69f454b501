"""How often a client gets an event while the router has no time for one a token, and the gaps that
it sees between tokens.

What an event costs hardly depends on how many tokens are in it. With time to spare every token goes
out as it comes; without, a short wait makes one event of several.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Sized
from functools import partial
from math import ceil

from baton.core.observe.timings import Durations
from baton.core.request.attempt import TokenLog

LOOK_S = 0.5
"""Between two looks at the CPU time of this process."""

FIRST_S = 0.05
"""Less apart than this, hardly two tokens of a stream meet."""

LONGEST_S = 1.0
"""A reader notices more."""

_RELIEF = 0.75
"""Busy below this share of the limit, events come closer together: not at once below it, for the
limit is where they belong."""

_MOST_CLOSER = 10.0
"""Times, at once."""


class LoadMonitor:
    """limit: how busy the process may be before it saves events, in cores."""

    def __init__(self, limit: float) -> None:
        self.interval_s = 0.0
        """Least time between two events of a stream; 0: they come as they come."""
        self._limit = limit

    def observe(self, busy: float) -> None:
        """Told at even distances: cores that the process has used since."""
        if busy > self._limit:
            self.interval_s = min(LONGEST_S, max(FIRST_S, 2 * self.interval_s))
        elif busy < _RELIEF * self._limit:
            # As close as makes it about as busy as that, were events all that it is busy with: then
            # what made it busy is forgotten as soon as it is over, and never overshot.
            closer = self.interval_s * max(busy / (_RELIEF * self._limit), 1 / _MOST_CLOSER)
            self.interval_s = closer if closer >= FIRST_S else 0.0


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


async def keep(monitor: LoadMonitor) -> None:
    """Feeds a monitor with the CPU time that this process uses, until cancelled."""
    spent, at = time.process_time(), time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now_spent, now = time.process_time(), time.monotonic()
        monitor.observe((now_spent - spent) / (now - at))
        spent, at = now_spent, now


class TokenGaps:
    """Of one request. logs: the output of each choice. times: of all requests."""

    def __init__(self, logs: Sequence[Sized], times: Durations) -> None:
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


class TokenCoalescer:
    """ask: has the text of a choice's new tokens asked for. searched: there are stop strings."""

    def __init__(
        self,
        logs: Sequence[TokenLog],
        ask: Callable[[int], None],
        pace: LoadMonitor,
        later: DeferredCalls,
        *,
        searched: bool,
    ) -> None:
        self._logs = logs
        self._ask = ask
        self._pace = pace
        self._later = later
        self._searched = searched
        self._emitted_at = 0.0
        self._clock = asyncio.get_running_loop().time
        self._waiting: set[int] = set()

    def emitted(self) -> None:
        """The client gets an event now."""
        self._emitted_at = self._clock()

    @property
    def early_s(self) -> float:
        """How much too early it would be to tell the client more now; 0 or less: it is not."""
        if not (self._emitted_at and self._pace.interval_s):
            return 0.0
        return self._emitted_at + self._pace.interval_s - self._clock()

    def came(self, choice: int) -> None:
        """A choice's log has grown or ended. Neither the first tokens wait nor the last."""
        if self._pace.interval_s and not (self._searched or self._logs[choice].ended):
            if choice in self._waiting:
                return
            if self.early_s > 0:
                self._waiting.add(choice)
                due = self._emitted_at + self._pace.interval_s
                self._later.at(due, partial(self._waited, choice))
                return
        self._ask(choice)

    def _waited(self, choice: int) -> None:
        self._waiting.discard(choice)
        self._ask(choice)
