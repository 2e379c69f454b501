"""Shows on stderr how far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from baton_loadtest.drive import Run

LOOK_S, SAY_S = 0.5, 10.0


class Shown:
    """Close it. total: requests that may come to be due."""

    def __init__(self, total: int, what: str) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._total, self._what = total, what
        self._looked = self._said = time.monotonic()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("due, {task.fields[open]} open"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # Its thread would take the time that requests need.
            auto_refresh=False,
            disable=not self._console.is_terminal,
        )
        self._bar = self._bars.add_task(what, total=total, open=0)
        self._bars.start()

    def __call__(self, run: Run, num_open: int) -> None:
        """Often, and mostly does nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._console.is_terminal:
            self._bars.update(self._bar, completed=len(run.samples), open=num_open, refresh=True)
        elif now - self._said >= SAY_S:
            self._said = now
            self._console.print(
                f"{self._what}: {len(run.samples)} of {self._total} due, {num_open} open"
            )

    def close(self) -> None:
        self._bars.stop()
