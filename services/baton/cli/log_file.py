"""The log of `baton up`: one file for all processes, bounded in size, that keeps nobody waiting.

Lines are written by a thread of this module's own. A disk that is full, slow or stuck costs lines
and nothing else: what could not be written is counted, and the first line that can be written again
is preceded by one that says how much is missing.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

FILE_BYTES = 32 << 20
"""A file that would become larger is renamed to NAME.1, and that one to NAME.2, and so on."""
OLD_FILES = 3
"""The file that would be NAME.4 is deleted."""
WAITING_BYTES = 4 << 20
"""Lines that wait to be written take no more memory than this; more of them are lost."""
WRITE_BYTES = 64 << 10
"""Lines are written so many bytes at a time, and are lost so many at a time when that fails."""
CLOSE_S = 2.0


class LogFile:
    """An open log. Close it.

    path: the file that is written now. Files of an earlier run are kept as older ones.
    """

    def __init__(
        self, path: Path, *, file_bytes: int = FILE_BYTES, old_files: int = OLD_FILES
    ) -> None:
        self.path = path
        self._file_bytes, self._old_files = file_bytes, old_files
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost_bytes = 0
        self._reason = ""
        self._closed = False
        self._changed = threading.Condition()
        self._descriptor = -1
        with suppress(OSError):
            self._rotate()
        # A daemon: a disk that is stuck must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Takes a line with its end. Returns at once and raises nothing."""
        with self._changed:
            if self._waiting_bytes + len(line) > WAITING_BYTES:
                self._lost_bytes += len(line)
                self._reason = self._reason or "the disk is too slow"
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Returns when all lines are written, or after timeout_s. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._closed):
                        self._changed.wait()
                    ends = self._closed
                    lines = self._next()
                if lines or ends:
                    self._append(lines)
                if ends and not lines:
                    return
        finally:
            self._release()

    def _next(self) -> bytes:
        """Takes lines that wait, as many as are written in one go."""
        taken = bytearray()
        while self._waiting and (not taken or len(taken) + len(self._waiting[0]) <= WRITE_BYTES):
            taken += self._waiting.popleft()
        self._waiting_bytes -= len(taken)
        return bytes(taken)

    def _append(self, lines: bytes) -> None:
        """Writes the lines, after what has to be said of lost ones; or counts them as lost."""
        with self._changed:
            lost, reason = self._lost_bytes, self._reason
        said = f"baton up: {lost} bytes of log are missing here: {reason}\n" if lost else ""
        data = said.encode() + lines
        try:
            self._write(data)
        except OSError as error:
            with self._changed:
                self._lost_bytes += len(lines)
                self._reason = error.strerror or "the file cannot be written"
            return
        with self._changed:
            # More may have been lost meanwhile: the next line tells of them.
            self._lost_bytes -= lost
            self._reason = self._reason if self._lost_bytes else ""

    def _write(self, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if not data:
            return
        if self._descriptor >= 0 and not os.fstat(self._descriptor).st_nlink:
            self._release()  # Somebody deleted the file, to have its room.
        if self._descriptor < 0:
            self._open()
        size = os.fstat(self._descriptor).st_size
        if size and size + len(data) > self._file_bytes:
            self._release()
            self._rotate()
            self._open()
            size = 0
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            # The file ends with a whole line, also where there was room for half of one.
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)

    def _release(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _rotate(self) -> None:
        """Renames all files, so that there is none at `path`."""
        if not self.path.exists():
            return
        # Earlier versions made it readable for all.
        os.chmod(self.path, 0o600)
        for number in range(self._old_files - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._old(number).replace(self._old(number + 1))
        self.path.replace(self._old(1))

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
