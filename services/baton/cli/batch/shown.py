"""Shows on stderr how far a batch is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

SAY_S = 10.0


class Shown:
    """total: lines of the batch; before: those that had their result when it began."""

    def __init__(self, total: int, before: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._began = self._said = time.monotonic()
        self._total, self._before = total, before
        self._done, self._bad, self._tokens = before, 0, 0
        self._bars = Bars(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("lines"),
            _Rate(),
            TextColumn("{task.fields[bad]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._bars.add_task("", total=total, completed=before, bad="", rate="")
        self._bars.start()

    def line(self, *, good: bool, tokens: int) -> None:
        """One more has its result."""
        self._done += 1
        self._bad += not good
        self._tokens += tokens
        bad = f"{self._bad} with errors" if self._bad else ""
        self._bars.update(self._bar, advance=1, bad=bad, rate=self._rate())
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= SAY_S:
            self._said = now
            left_s = (self._total - self._done) * self._elapsed_s() / (self._done - self._before)
            self._console.print(
                f"{self._done} of {self._total} lines, {self._rate()}, about {left_s:.0f} s left"
            )

    def close(self) -> str:
        """Takes the bar away. Returns how fast it went, in words."""
        self._bars.stop()
        return f"{self._elapsed_s():.1f} s: {self._rate()}"

    def _rate(self) -> str:
        elapsed_s = max(1e-9, self._elapsed_s())
        lines = (self._done - self._before) / elapsed_s
        return f"{lines:.1f} lines/s, {self._tokens / elapsed_s:.0f} tokens/s"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["rate"]))
