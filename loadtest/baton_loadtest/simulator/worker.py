"""SimWorker, what simulated workers of both roles are made of; plans no step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from baton.core.kvcache.block_pool import BlockPool
from baton.core.kvcache.cache_events import Change
from baton.core.request.attempt import AttemptKey
from baton.core.routing.load import WorkerLoad, WorkerState
from baton.core.scheduler.scheduler import Scheduler
from baton_loadtest.simulator.queue import EventQueue
from baton_loadtest.simulator.reports import Reporter, Tell
from baton_loadtest.simulator.runs import Run
from baton_loadtest.simulator.settings import Delays, WorkerFacts
from baton_loadtest.simulator.use import Use


class SimWorker(ABC):
    """A pool, attempts that run, and what the router is told of both. A subclass has the scheduler,
    and reports once it has, by `_report`. number: in its role's pool.
    """

    scheduler: Scheduler

    def __init__(
        self, number: int, facts: WorkerFacts, delays: Delays, queue: EventQueue, tell: Tell
    ) -> None:
        self.number = number
        self.facts = facts
        self.use = Use()
        self._changes: deque[Change] = deque()
        self.pool = BlockPool(facts.num_blocks, facts.block_size, self._changes.append)
        self._queue = queue
        self._delays = delays
        self._tell = tell
        self._runs: dict[AttemptKey, Run] = {}
        self._state = WorkerState.SERVING

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a step runs."""

    @property
    def is_empty(self) -> bool:
        """Whether no attempt needs it any more."""
        return not self._runs

    def leave(self) -> None:
        """It finishes what it has, and tells routers that it takes nothing new."""
        self._state = WorkerState.DRAINING
        self._reporter.news()

    def load(self) -> tuple[WorkerLoad, bool]:
        """What it would tell now, and whether it has work."""
        load = self.scheduler.load
        told = WorkerLoad(
            self._state,
            load.waiting_sequences,
            load.waiting_tokens,
            load.running_sequences,
            self._free_blocks(load.free_blocks),
            speed=self.facts.told,
        )
        return told, self.scheduler.has_work

    def _free_blocks(self, told: int) -> int:
        """Those of the pool now; told: as the scheduler knows them."""
        return told

    def _report(self) -> None:
        phase = (self.number * 0.618034) % 1.0
        self._reporter = Reporter(
            self._queue, self._delays, self._changes, self.load, phase, self._tell
        )

    @property
    def _used(self) -> int:
        return self.pool.num_blocks - self.pool.num_free
