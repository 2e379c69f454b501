"""Coalesces a stream's events while the router is short of CPU time, and measures the gaps between
tokens.

The cost of an event hardly depends on its number of tokens. With spare CPU every token is sent as
it arrives; without, a short wait combines several tokens in one event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Sized
from functools import partial
from math import ceil

from batonlm.core.observe.timings import Durations
from batonlm.core.request.attempt import TokenLog

LOOK_S = 0.5
"""Seconds between two readings of the process's CPU time."""

FIRST_S = 0.05
"""The shortest interval in use: within less, a stream rarely has two tokens."""

LONGEST_S = 1.0
"""The longest interval: readers notice more."""

_RELIEF = 0.75
"""Below this share of the limit the interval shrinks. It is below 1 because the limit itself is the
intended load."""

_MOST_CLOSER = 10.0
"""The largest factor by which the interval shrinks at once."""


class LoadMonitor:
    """Derives the interval between events of a stream from the process's CPU load."""

    def __init__(self, limit: float) -> None:
        """limit: the CPU load, in cores, above which events are coalesced."""
        self.interval_s = 0.0
        """Least seconds between two events of a stream; 0: no coalescing."""
        self._limit = limit

    def observe(self, busy: float) -> None:
        """Takes the CPU load in cores since the last call. Call it at regular intervals."""
        if busy > self._limit:
            self.interval_s = min(LONGEST_S, max(FIRST_S, 2 * self.interval_s))
        elif busy < _RELIEF * self._limit:
            # The new interval would bring the load to that share if events were the only load. So a
            # load from another cause is forgotten soon after it ends, without overshooting.
            closer = self.interval_s * max(busy / (_RELIEF * self._limit), 1 / _MOST_CLOSER)
            self.interval_s = closer if closer >= FIRST_S else 0.0


TICK_S = 0.05
"""The resolution of the timer in seconds; calls run at the end of their tick."""


class DeferredCalls:
    """Runs calls at later times on one event loop. A timer exists only while calls are pending."""

    def __init__(self) -> None:
        self._due: dict[int, list[Callable[[], None]]] = {}
        """By the tick at which they run."""
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedules a call. when: on the running loop's clock. call: must neither block nor
        raise."""
        self._due.setdefault(ceil(when / TICK_S), []).append(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def close(self) -> None:
        """Drops the pending calls."""
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
    """Feeds a monitor with the CPU time of this process until cancelled."""
    spent, at = time.process_time(), time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now_spent, now = time.process_time(), time.monotonic()
        monitor.observe((now_spent - spent) / (now - at))
        spent, at = now_spent, now


class TokenGaps:
    """Measures the gaps between the tokens of one request."""

    def __init__(self, logs: Sequence[Sized], times: Durations) -> None:
        """logs: the output of each choice. times: the histogram of all requests."""
        self._logs = logs
        self._times = times
        self._last: dict[int, tuple[int, float]] = {}
        """For each choice that began: its length, and when it reached that length."""

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
    """Decides when the new tokens of a choice are sent to the detokenizer."""

    def __init__(
        self,
        logs: Sequence[TokenLog],
        ask: Callable[[int], None],
        pace: LoadMonitor,
        later: DeferredCalls,
        *,
        searched: bool,
    ) -> None:
        """ask: requests the text of a choice's new tokens. searched: there are stop strings."""
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
        """Returns the seconds until the next event is due; 0 or less: now."""
        if not (self._emitted_at and self._pace.interval_s):
            return 0.0
        return self._emitted_at + self._pace.interval_s - self._clock()

    def came(self, choice: int) -> None:
        """A choice's log has grown or ended. The first tokens and the last are not delayed."""
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
