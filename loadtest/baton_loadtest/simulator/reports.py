"""Reporter, when and what a worker tells the router of itself; decides nothing.

A worker looks at even distances whether there is news, and says so; busy ones say something at
least every heartbeat. That what runs grows by a token a step is no news.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

from baton.core.kvcache.cache_events import CacheBatch, CacheLog, CacheReader, Change
from baton.core.routing.load import WorkerLoad
from baton_loadtest.simulator.queue import IDLE, EventQueue
from baton_loadtest.simulator.settings import Delays

Tell = Callable[[WorkerLoad, list[CacheBatch]], None]


class Reporter:
    """changes: what the worker's pool tells of its prefix cache. load: called when it is told.
    phase: a share of the distance between two looks: workers do not all look at once."""

    def __init__(
        self,
        queue: EventQueue,
        delays: Delays,
        changes: deque[Change],
        load: Callable[[], tuple[WorkerLoad, bool]],
        phase: float,
        tell: Tell,
    ) -> None:
        self._queue = queue
        self._delays = delays
        self._load = load
        self._tell = tell
        self._reader = CacheReader(CacheLog(changes))
        self._phase_s = phase * delays.report_s
        self._next: float | None = None
        self._look()

    def news(self) -> None:
        """Something joined, left or was computed."""
        distance, now = self._delays.report_s, self._queue.now
        tick = ceil((now - self._phase_s) / distance) * distance + self._phase_s
        if self._next is None or tick < self._next:
            self._next = tick
            self._queue.at(tick, self._due, tick, order=IDLE)

    def _due(self, tick: float) -> None:
        if tick == self._next:
            self._look()

    def _look(self) -> None:
        load, busy = self._load()
        self._next = None
        told = self._queue.now + self._delays.hop_s
        self._queue.at(told, self._tell, load, self._reader.read(), order=IDLE)
        if busy:
            self._next = beat = self._queue.now + self._delays.heartbeat_s
            self._queue.at(beat, self._due, beat, order=IDLE)
