"""Child, a process of Baton's own that answers each line by one; knows no meaning of lines.

`subprocess` starts it, without the handlers that Python and gRPC have for forks. uvloop runs them,
and of its children beside threads of gRPC some die before they begin (measured: 2 in 100).
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import baton


class Child:
    """May be used by several threads; each line is a thread's own. Nothing of our environment,
    which may hold secrets, is in its own.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": str(Path(next(iter(baton.__path__))).parent)},
        )
        self._lock = threading.Lock()

    @property
    def code(self) -> int | None:
        """How it ended, as `subprocess` has it; None while it lives."""
        return self._process.poll()

    @property
    def over(self) -> bool:
        """Whether nothing is left of it."""
        assert self._process.stdout is not None
        return self._process.stdout.closed

    def ready(self, limit_s: float) -> bool:
        """Blocks. Whether it said a first line, as it does before it takes one; else it is over."""
        return self.ask(b"", limit_s) is not None

    def ask(self, line: bytes, limit_s: float) -> bytes | None:
        """Blocks. line: ends with a newline. The line that it answers; None if it is over, at the
        latest when the time is up."""
        with self._lock:
            answer = None
            try:
                answer = self._answer(line, limit_s)
            finally:
                if answer is None:
                    self._end()
            return answer

    def kill(self) -> None:
        """Whoever asks it just now is told None."""
        self._process.kill()

    def end(self) -> None:
        """Kills it, and blocks until nothing is left of it."""
        self.kill()
        with self._lock:
            self._end()

    def _answer(self, line: bytes, limit_s: float) -> bytes | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self.over:
            return None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            timer.cancel()
        return answer if answer.endswith(b"\n") else None

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
