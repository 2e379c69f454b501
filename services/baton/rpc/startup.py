"""How far a process's start has come: its parts and their times, and how much of the weights is in.

Counts from when the kernel started the process, so that what Python and imports take is seen too.
Any thread may tell and ask.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from baton.rpc import metrics

log = logging.getLogger(__name__)

SAY_EVERY_S = 5.0
IMPORT = "import"
WEIGHTS = "weights"
CHECK = "check"
READY = "ready"


class Startup:
    """part: what it does now; READY once it took work. took: the parts that are done, in seconds.
    ready_s: all of them together, once it took work for the first time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, age_s: float | None = None):
        """age_s: of the process now; None: the kernel is asked."""
        self._clock = clock
        self._entered = clock() - (process_age_s() if age_s is None else age_s)
        self.took: dict[str, float] = {}
        self._done = self._total = 0
        self._said = clock()
        self.ready_s: float | None = None
        self.part = IMPORT

    def enter(self, part: str) -> None:
        """What was done so far is done. Without effect once it is ready."""
        if self.part in (part, READY):
            return
        now = self._clock()
        self.took[self.part] = self.took.get(self.part, 0.0) + now - self._entered
        self.part, self._entered = part, now

    def weights(self, done: int, total: int) -> None:
        """So many bytes are in, of all; after the last of them they are checked."""
        self.enter(WEIGHTS)
        self._done, self._total = done, total
        if done >= total:
            self.enter(CHECK)
        elif self._clock() - self._said >= SAY_EVERY_S:
            self._said = self._clock()
            log.info("%s", self.words)

    def ready(self) -> None:
        """It takes work. Only the first time counts."""
        self.enter(READY)
        if self.ready_s is None:
            self.ready_s = sum(self.took.values())
            took = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.took.items())
            log.info("ready %.1f s after the process began: %s", self.ready_s, took)

    @property
    def progress(self) -> float:
        """Of the weights, from 0 to 1; 1 once it is ready, whatever it had to load."""
        if self.part == READY:
            return 1.0
        return min(1.0, self._done / self._total) if self._total else 0.0

    @property
    def words(self) -> str:
        """For people: "loading weights 43 %"."""
        if self.part == WEIGHTS:
            return f"loading {WEIGHTS} {100 * self.progress:.0f} %"
        return self.part if self.part == READY else f"starting: {self.part}"

    def export(self) -> Callable[[], None]:
        """Puts it on /metrics, until the returned function is called."""
        ends = [
            metrics.gauge(metrics.LOAD_PROGRESS, lambda: {(): self.progress}),
            metrics.gauge(metrics.STARTUP, lambda: {(p,): s for p, s in dict(self.took).items()}),
            metrics.gauge(
                metrics.READY, lambda: {} if self.ready_s is None else {(): self.ready_s}
            ),
        ]

        def end() -> None:
            for stop in ends:
                stop()

        return end


def process_age_s() -> float:
    """Since the kernel started this process; 0 where it cannot be asked."""
    try:
        # The name, in brackets, may hold blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
