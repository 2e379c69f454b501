"""Child, a process of Baton's own that answers each line by one.

`subprocess` starts it, without the handlers that Python and gRPC have for forks. uvloop runs them,
and of its children beside threads of gRPC some die before they begin (measured: 2 in 100).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import baton

MAX_ANSWER_BYTES = 1 << 20
_READ_BYTES = 1 << 18


class Child:
    """May be used by several threads; each line is a thread's own. Nothing of our environment,
    which may hold secrets, is in its own. max_answer_bytes: of a line that it answers; a longer one
    ends it.
    """

    def __init__(
        self, module: str, *arguments: str, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PYTHONPATH": str(Path(next(iter(baton.__path__))).parent)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        # With a deadline for both, also where it reads nothing.
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._max_answer_bytes = max_answer_bytes
        self._lock = threading.Lock()
        self.pid = self._process.pid
        self.late = False
        """Whether it was ended because a time was up."""

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
                answer = self._answer(line, time.monotonic() + limit_s)
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

    def _answer(self, line: bytes, deadline: float) -> bytes | None:
        if self.over:
            return None
        left = memoryview(line)
        pieces: list[bytes] = []
        room = self._max_answer_bytes
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        writing = False
        while room >= 0:
            if left:
                try:
                    left = left[os.write(self._in, left) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return None
            if bool(left) != writing:
                writing = bool(left)
                (poller.register if writing else poller.unregister)(
                    self._in, *((select.POLLOUT,) if writing else ())
                )
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self.late = True
                return None
            if self._out not in dict(poller.poll(1000 * remaining_s)):
                continue
            with suppress(BlockingIOError):
                piece = os.read(self._out, _READ_BYTES)
                if not piece:
                    return None
                pieces.append(piece)
                room -= len(piece)
                if piece.endswith(b"\n"):
                    return b"".join(pieces)
        return None

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process.stdin.close()
