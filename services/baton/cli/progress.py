"""Shows on stderr what a start of Baton is doing; knows only the supervisor's notices."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars


class Progress:
    """One line a process on a terminal, plain lines elsewhere."""

    def __init__(self, num_processes: int) -> None:
        self._console = Console(file=sys.stderr)
        self._began = time.monotonic()
        self._serving = 0
        self._num_processes = num_processes
        self._ready = False
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn("{task.description:>14}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._console.print(f"Starting {num_processes} processes")
        self._bars.start()

    def show(self, what: str, *details: object) -> None:
        match what, details:
            case "loading", (str(name), int(done), int(total)):
                if name not in self._tasks:
                    self._tasks[name] = self._bars.add_task(name, total=total)
                self._bars.update(self._tasks[name], completed=done, total=total)
            case "serving", (str(name),) if not self._ready:
                self._serving += 1
                self._console.print(
                    f"  {self._elapsed():5.1f} s  {name} serves "
                    f"({self._serving} of {self._num_processes})"
                )
            case "serving", (str(name),):
                self._console.print(f"{name} serves again")
            case "restarting", (str(name), code):
                self._console.print(f"{name} ended ({_ending(code)}); starting it again")
            case "ready", ():
                self._ready = True
                self._bars.stop()
                self._console.print(f"Ready after {self._elapsed():.1f} s")

    def close(self) -> None:
        self._bars.stop()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def _ending(code: object) -> str:
    if isinstance(code, int) and code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code}"
