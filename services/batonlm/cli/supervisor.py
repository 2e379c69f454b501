"""Runs all processes of a layout, and restarts those that end, with back-off.

Events are reported through `notify`: ("started", name, pid), ("part", name, part of its start),
("loading", name, done, total), ("serving", name), ("restarting", name, exit code), ("ready",),
("stopping", number of processes, whether they are killed), ("stopped",). The first start must
succeed: if a process ends before all are ready, the supervisor ends with `StartFailed`, because a
restart does not fix a wrong flag.

In whatever state the children are, `run` returns at most STOP_BOUND_S after `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from batonlm.cli import state
from batonlm.cli.forks import ForksEnded, ForkServer
from batonlm.cli.http_client import met
from batonlm.cli.layout import Layout, ProcessSpec
from batonlm.core.errors import BatonError
from batonlm.rpc.children import KILL_S, LONGEST_BACKOFF_S, Backoff, end_all
from batonlm.rpc.peers import PEER_TOKEN_VARIABLE

FILE_BYTES = 32 << 20
"""A file that would exceed this is renamed to NAME.1, the one before to NAME.2, and so on."""
OLD_FILES = 3
"""The file that would become NAME.4 is deleted."""
WAITING_BYTES = 4 << 20
"""Limit of the memory for lines that wait to be written; further lines are lost."""
WRITE_BYTES = 64 << 10
"""Lines are written in pieces of this size. If that fails, the whole piece is lost."""
CLOSE_S = 2.0


class LogFile:
    """The log of `baton up`: one file for all processes, bounded in size. Close it.

    A thread of its own writes the lines, so writers never wait. A full, slow or stuck disk costs
    only lines: lost bytes are counted, and a line with their number precedes the next written one.

    path: the current file. Files of earlier runs are kept as older ones.
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
        # A daemon thread: a stuck disk must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queues a line, which includes its end. Returns at once and raises nothing."""
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
        """Takes the waiting lines that are written in one piece."""
        taken = bytearray()
        while self._waiting and (not taken or len(taken) + len(self._waiting[0]) <= WRITE_BYTES):
            taken += self._waiting.popleft()
        self._waiting_bytes -= len(taken)
        return bytes(taken)

    def _append(self, lines: bytes) -> None:
        """Writes the lines, after the number of lost bytes if any; or counts them as lost."""
        with self._changed:
            lost, reason = self._lost_bytes, self._reason
        text = f"baton up: {lost} bytes of log are missing here: {reason}\n" if lost else ""
        data = text.encode() + lines
        try:
            self._write(data)
        except OSError as error:
            with self._changed:
                self._lost_bytes += len(lines)
                self._reason = error.strerror or "the file cannot be written"
            return
        with self._changed:
            # More may have been lost meanwhile: the next piece reports them.
            self._lost_bytes -= lost
            self._reason = self._reason if self._lost_bytes else ""

    def _write(self, data: bytes) -> None:
        """Writes all of the data or nothing. Raises OSError."""
        if not data:
            return
        if self._descriptor >= 0 and not os.fstat(self._descriptor).st_nlink:
            self._release()  # The file was deleted, to free its space.
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
            # A partial write is undone, so that the file ends with a complete line.
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
        """Renames all files, so that `path` is free."""
        if not self.path.exists():
            return
        # Earlier versions created it readable for all users.
        os.chmod(self.path, 0o600)
        for number in range(self._old_files - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._old(number).replace(self._old(number + 1))
        self.path.replace(self._old(1))

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


LAST_LINES = 20
LINE_BYTES = 64 << 10
"""The rest of a longer line is dropped."""
PIPES_S = 1.0
"""How long the pipes are read after a child's end. A process that the child started may hold them
open for ever."""

OnReport = Callable[..., None]
"""Called as on_report("part", name, part) and on_report("loading", name, done, total)."""
_STDOUT, _STDERR = 1, 2


class ChildProcess:
    """One run of one process. `wait` for its end, or `close` it.

    A child reports by JSON lines on stdout: `{"part": name}` of its start, `{"loading": done,
    "total": all}` in bytes while it loads, and a line with "role" when it serves. Its stderr goes
    to the log. Both pipes are read as long as the child writes anything: a child whose pipe is full
    blocks.
    """

    def __init__(self, spec: ProcessSpec, log: LogFile, on_report: OnReport) -> None:
        self.spec = spec
        self.serving = asyncio.Event()
        """Set when the process reported that it serves."""
        self.last_words: deque[str] = deque(maxlen=LAST_LINES)
        """The last lines of its log."""
        self._log = log
        self._on_report = on_report
        self._ended, self._drained = asyncio.Event(), asyncio.Event()
        self._transport: asyncio.SubprocessTransport

    @classmethod
    async def start(
        cls,
        spec: ProcessSpec,
        log: LogFile,
        threads: int,
        on_report: OnReport,
        variables: Mapping[str, str] | None = None,
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
        forks: ForkServer | None = None,
    ) -> ChildProcess:
        """Starts the process. Raises OSError. variables: additional environment variables, which
        other users cannot read, unlike a command line. forks: starts it, if the process is to be a
        fork; the environment is that of its process then.
        """
        environment = {
            **os.environ,
            "BATON_PARENT_PID": str(os.getpid()),
            # Must be set before torch is imported: idle threads would otherwise spin on the other
            # engine's core.
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            # gRPC logs each graceful disconnect of a peer as if it were an error.
            "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
            **(variables or {}),
        }
        child = cls(spec, log, on_report)
        pipes = {_STDOUT: _Lines(child._announced), _STDERR: _Lines(child._logged)}
        protocol = _Protocol(pipes, child._ended, child._drained)
        if forks is not None and spec.is_fork:
            on_report("part", spec.name, "fork")
            try:
                child._transport = await forks.start(spec.module, protocol)
                return child
            except ForksEnded as error:
                log.write(f"baton up: {spec.name} is no fork: {error.message}\n".encode())
        child._transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: protocol, *spec.command, stdin=stdin, env=environment
        )
        return child

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    async def wait(self) -> int:
        """Returns the exit code, after all output of the child was read."""
        await self._ended.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), PIPES_S)
        self._transport.close()
        code = self._transport.get_returncode()
        assert code is not None
        return code

    def terminate(self) -> None:
        """Sends SIGTERM; also resumes a stopped child, which would not receive the signal."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.terminate()
            self._transport.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._transport.kill()

    def close(self) -> None:
        """Kills the process if it runs, and stops reading its output. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.close()

    def _announced(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            if "loading" in message:
                done, total = int(message["loading"]), int(message["total"])
                self._on_report("loading", self.spec.name, done, total)
            elif "part" in message:
                self._on_report("part", self.spec.name, str(message["part"]))
            elif "role" in message:
                self.serving.set()
        except (ValueError, TypeError, KeyError):
            return

    def _logged(self, line: bytes) -> None:
        self._log.write(line)
        self.last_words.append(line.decode(errors="replace").rstrip())


class _Protocol(asyncio.SubprocessProtocol):
    """ended: set when the process has ended. drained: set when all its pipes are closed."""

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
    """Splits a pipe's output into lines and passes each, including its end, to `take`."""

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


START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 25.0
"""Time for the routers, and then for all others, to end before they are killed."""
STOP_BOUND_S = 2 * (STOP_TIMEOUT_S + KILL_S) + KILL_S + CLOSE_S
POLL_S = 0.05

Notify = Callable[..., None]


class StartFailed(BatonError):
    """A process ended, or took too long, before all were ready."""


class Supervisor:
    """Owns the child processes. `run` returns after `stop` was called; no child outlives it.

    longest_backoff_s: the longest pause before a failing process is restarted. stop_timeout_s: see
    STOP_TIMEOUT_S.
    """

    def __init__(
        self,
        layout: Layout,
        notify: Notify,
        *,
        longest_backoff_s: float = LONGEST_BACKOFF_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._layout = layout
        self._notify = notify
        self._longest_backoff_s = longest_backoff_s
        self._stop_timeout_s = stop_timeout_s
        self._children: dict[str, ChildProcess] = {}
        self._serving = {spec.name: asyncio.Event() for spec in layout.processes}
        self._wanted = {spec.name: asyncio.Event() for spec in layout.processes}
        for wanted in self._wanted.values():
            wanted.set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = asyncio.Event()
        self._failure: StartFailed | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ends the processes gracefully; the second call kills those that still run."""
        if self._stop.is_set():
            self._hurry.set()
        if self._children and not (self._failure or self._stopped):
            self._notify("stopping", len(self._children), self._hurry.is_set())
        self._stop.set()

    def child(self, name: str) -> ChildProcess:
        """Returns the current run of a process, or its last one."""
        return self._children[name]

    def withhold(self, name: str) -> None:
        """Prevents restarts of a process after it has ended, until `release`."""
        self._wanted[name].clear()

    def release(self, name: str) -> None:
        self._wanted[name].set()

    def description(self) -> dict[str, Any]:
        """Returns the JSON of `--detach`, with the supervisor's own pid."""
        return {
            "http": self._layout.http,
            "grpc": self._layout.grpc,
            **({"ca": self._layout.ca} if self._layout.ca else {}),
            "pid": os.getpid(),
            "processes": [
                {
                    "role": spec.role,
                    **({"model": spec.model} if spec.model else {}),
                    "pid": self._children[spec.name].pid,
                    "grpc": spec.grpc,
                    "metrics": self._layout.metrics_url(spec),
                }
                for spec in self._layout.processes
                if spec.name in self._children
            ],
        }

    async def run(self) -> None:
        """Runs until stopped. Raises StartFailed, also if another supervisor uses this folder."""
        try:
            with state.locked():
                await self._run()
        except state.AlreadyRuns as other:
            raise StartFailed(other.message) from None
        except OSError as error:
            raise StartFailed(f"{state.folder()} cannot be used: {error.strerror}") from error
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        log = LogFile(state.log_file())
        try:
            if any(spec.is_fork for spec in self._layout.processes):
                async with self._forking(log) as forks:
                    await self._keep_all(log, forks)
            else:
                await self._keep_all(log, None)
        finally:
            log.close()
            self._stopped = True
            self._notify("stopped")

    @asynccontextmanager
    async def _forking(self, log: LogFile) -> AsyncIterator[ForkServer]:
        """Runs the process that forks. Raises OSError."""
        forks = ForkServer()
        spec = ProcessSpec("forks", 0, (sys.executable, "-m", "batonlm.cli.forks"), "", "")
        child = await self._start(spec, log, stdin=forks.stdin.fileno())
        forks.stdin.close()
        try:
            yield forks
        finally:
            child.kill()
            await asyncio.wait({asyncio.create_task(child.wait())}, timeout=KILL_S)
            child.close()
            await forks.close()

    async def _keep_all(self, log: LogFile, forks: ForkServer | None) -> None:
        """Runs all processes until stopped, and ends them."""
        specs = self._layout.processes
        keepers = [asyncio.create_task(self._keep(spec, log, forks)) for spec in specs]
        watcher = asyncio.create_task(self._watch_start())
        try:
            await self._stop.wait()
        finally:
            self._stop.set()
            # First, so that no child is restarted while the others are ended.
            for task in (watcher, *keepers):
                task.cancel()
            await asyncio.gather(watcher, *keepers, return_exceptions=True)
            await self._end_children()

    async def _keep(self, spec: ProcessSpec, log: LogFile, forks: ForkServer | None) -> None:
        backoff = Backoff(self._longest_backoff_s)
        while True:
            began = time.monotonic()
            why, code = await self._live(spec, log, forks)
            if self._stop.is_set():
                return
            if not self._ready.is_set():
                self._fail(f"{spec.name} did not start: {why}")
                return
            self._notify("restarting", spec.name, code)
            await asyncio.sleep(backoff.after(time.monotonic() - began))
            await self._wanted[spec.name].wait()

    async def _start(self, spec: ProcessSpec, log: LogFile, **how: Any) -> ChildProcess:
        token = {PEER_TOKEN_VARIABLE: self._layout.peer_token}
        return await ChildProcess.start(spec, log, self._layout.threads, self._notify, token, **how)

    async def _live(
        self, spec: ProcessSpec, log: LogFile, forks: ForkServer | None
    ) -> tuple[str, int]:
        """Runs a process until it ends. Returns why it ended, in words, and its exit code."""
        try:
            child = await self._start(spec, log, forks=forks)
        except OSError as error:
            return f"it could not be started: {error.strerror}", 1
        self._children[spec.name] = child
        self._notify("started", spec.name, child.pid)
        if self._ready.is_set():
            # Without space on the disk the file is not written; `baton down` works without it.
            with suppress(OSError):
                self._write_state()
        serving = asyncio.create_task(self._announce(child))
        try:
            code = await child.wait()
        finally:
            serving.cancel()
        return child.last_words[-1] if child.last_words else f"it ended with code {code}", code

    async def _announce(self, child: ChildProcess) -> None:
        await child.serving.wait()
        self._serving[child.spec.name].set()
        self._notify("serving", child.spec.name)

    async def _watch_start(self) -> None:
        """Reports ready when every process serves and every router is connected to every worker."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for serving in self._serving.values():
                    await serving.wait()
                await _wait_for_routers(self._layout)
            self._write_state()
        except TimeoutError:
            self._fail(f"not ready after {START_TIMEOUT_S:.0f} s; see {state.log_file()}")
        except OSError as error:
            self._fail(f"{state.state_file()} cannot be written: {error.strerror}")
        else:
            self._ready.set()
            self._notify("ready")

    def _write_state(self) -> None:
        """Writes the state file. Raises OSError."""
        description = self.description()
        processes = [each | state.process(each["pid"]) for each in description["processes"]]
        token = self._layout.peer_token
        state.write(
            description | state.process(os.getpid()) | {"token": token, "processes": processes}
        )

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = StartFailed(message)
        self._stop.set()

    async def _end_children(self) -> None:
        """Ends routers first, so that no request needs a missing worker; then the others. Kills
        what remains."""
        children = list(self._children.values())
        routers = [child for child in children if child.spec.role == "router"]
        for group in (routers, [child for child in children if child not in routers]):
            if group:
                await self._end(group)

    async def _end(self, group: Sequence[ChildProcess]) -> None:
        await end_all(group, self._stop_timeout_s, self._hurry)
        for child in group:
            child.close()


async def _wait_for_routers(layout: Layout) -> None:
    """Returns when every router is connected to every worker.

    A router is healthy without a prefill worker, because decode workers can prefill. Requests would
    then be answered without the hand-overs that were asked for.
    """
    workers = Counter(spec.role for spec in layout.processes if spec.role != "router")
    urls = [layout.metrics_url(spec) for spec in layout.processes if spec.role == "router"]
    trust = ssl.create_default_context(cafile=layout.ca) if layout.ca else None
    while True:
        # One short call at a time in a thread: a thread that waits longer would delay `run`'s end.
        for url in list(urls):
            if workers <= await asyncio.to_thread(met, url, trust, layout.peer_token):
                urls.remove(url)
        if not urls:
            return
        await asyncio.sleep(POLL_S)
