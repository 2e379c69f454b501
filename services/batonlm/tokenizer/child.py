"""Child, a subprocess that answers each line with one line.

It is started with `subprocess`, which runs no fork handlers of Python and gRPC. uvloop runs them,
and some of its children die at once beside threads of gRPC (measured: 2 in 100).
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

import batonlm

MAX_ANSWER_BYTES = 1 << 20
_READ_BYTES = 1 << 18


class Child:
    """Thread-safe: one `ask` runs at a time. The child does not inherit the environment, which may
    hold secrets. max_answer_bytes: the longest answer; a longer one ends the child.
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
            env={"PYTHONPATH": str(Path(next(iter(batonlm.__path__))).parent)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        # Non-blocking, so that the deadline also holds when the child does not read.
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._max_answer_bytes = max_answer_bytes
        self._lock = threading.Lock()
        self.pid = self._process.pid
        self.late = False
        """Whether it was ended because an answer took too long."""

    @property
    def code(self) -> int | None:
        """The return code, as in `subprocess`; None while it runs."""
        return self._process.poll()

    @property
    def over(self) -> bool:
        """Whether it has ended and its pipes are closed."""
        assert self._process.stdout is not None
        return self._process.stdout.closed

    def ready(self, limit_s: float) -> bool:
        """Whether the child wrote its first line, which it does when it is ready; otherwise it is
        ended. Blocks."""
        return self.ask(b"", limit_s) is not None

    def ask(self, line: bytes, limit_s: float) -> bytes | None:
        """Sends a line, which ends with a newline, and returns the answer. Returns None, and ends
        the child, when it fails or takes longer than limit_s. Blocks."""
        with self._lock:
            answer = None
            try:
                answer = self._answer(line, time.monotonic() + limit_s)
            finally:
                if answer is None:
                    self._end()
            return answer

    def kill(self) -> None:
        """Kills it. A running `ask` returns None."""
        self._process.kill()

    def end(self) -> None:
        """Kills it, and blocks until it has ended and its pipes are closed."""
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
