"""One child process of the supervisor: starts it, reads what it announces, notices its end.

A child announces itself by JSON lines on stdout: `{"loading": done, "total": all}` in bytes while
it loads, a line with "role" once it serves. Its stderr goes to the log. Both pipes are read for as
long as the child writes, whatever it writes: a child whose pipe is full stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping

from baton.cli.layout import ProcessSpec
from baton.cli.log_file import LogFile

LAST_LINES = 20
LINE_BYTES = 64 << 10
"""Of a longer line, the rest is left out."""
PIPES_S = 1.0
"""What is still in the pipes is read for so long after a child's end. A process that the child
started may hold them open for ever."""

OnLoading = Callable[[str, int, int], None]
_STDOUT, _STDERR = 1, 2


class Child:
    """One life of one process. `wait` for its end, or `close` it.

    serving: set when it said so. last_words: of its log.
    """

    def __init__(self, spec: ProcessSpec, log: LogFile, on_loading: OnLoading) -> None:
        self.spec = spec
        self.serving = asyncio.Event()
        self.last_words: deque[str] = deque(maxlen=LAST_LINES)
        self._log = log
        self._on_loading = on_loading
        self._ended, self._drained = asyncio.Event(), asyncio.Event()
        self._transport: asyncio.SubprocessTransport

    @classmethod
    async def start(
        cls,
        spec: ProcessSpec,
        log: LogFile,
        threads: int,
        on_loading: OnLoading,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Raises OSError. variables: more of the child's environment, which other users cannot
        read, as they can its command line.
        """
        environment = {
            **os.environ,
            "BATON_PARENT_PID": str(os.getpid()),
            # Must be set before torch is imported: idle threads would else spin on the other
            # engine's core.
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            # gRPC tells every goodbye of a peer as if it were news.
            "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
            **(variables or {}),
        }
        child = cls(spec, log, on_loading)
        pipes = {_STDOUT: _Lines(child._announced), _STDERR: _Lines(child._logged)}
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Protocol(pipes, child._ended, child._drained),
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        child._transport = transport
        return child

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    async def wait(self) -> int:
        """The exit code, after what the child wrote was read."""
        await self._ended.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), PIPES_S)
        self._transport.close()
        code = self._transport.get_returncode()
        assert code is not None
        return code

    def terminate(self) -> None:
        """Asks it to end; also a child that is stopped, which would not see the signal."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.terminate()
            self._transport.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._transport.kill()

    def close(self) -> None:
        """Kills it if it runs, and reads no more of it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.close()

    def _announced(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            if "loading" in said:
                self._on_loading(self.spec.name, int(said["loading"]), int(said["total"]))
            elif "role" in said:
                self.serving.set()
        except (ValueError, TypeError, KeyError):
            return

    def _logged(self, line: bytes) -> None:
        self._log.write(line)
        self.last_words.append(line.decode(errors="replace").rstrip())


class _Protocol(asyncio.SubprocessProtocol):
    """ended: set when the process has. drained: set when nothing can come from its pipes."""

    def __init__(
        self, pipes: Mapping[int, _Lines], ended: asyncio.Event, drained: asyncio.Event
    ) -> None:
        self._pipes, self._open = pipes, set(pipes)
        self._ended, self._drained = ended, drained

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._pipes[fd].feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd in self._open:
            self._pipes[fd].end()
            self._open.discard(fd)
        if not self._open:
            self._drained.set()

    def process_exited(self) -> None:
        self._ended.set()


class _Lines:
    """Cuts what comes from a pipe into lines, and gives each to `take`, with its end."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._held = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._add(part)
            self._give()
        self._add(rest)

    def end(self) -> None:
        if self._held:
            self._give()

    def _add(self, part: bytes) -> None:
        room = LINE_BYTES - len(self._held)
        self._held += part[:room]
        self._left_out += max(0, len(part) - room)

    def _give(self) -> None:
        more = b" [%d more bytes]" % self._left_out if self._left_out else b""
        line = bytes(self._held) + more + b"\n"
        self._held.clear()
        self._left_out = 0
        self._take(line)
