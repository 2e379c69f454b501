"""Starts the engine processes of one machine as forks of a process that has imported what they use.

The imports of torch and transformers are most of an engine's start, and most of its memory that is
neither weights nor KV. Forks share both: the process imports once, and the memory is counted once.

`main` is that process. It has one thread, runs no model and touches no GPU, because a fork keeps
nothing of either. Its stdin is a socket, from which it takes one job at a time:

    supervisor  ──  ["batonlm.decode", "--listen", …] and the ends of two pipes  ──►  main
    supervisor  ◄─────────────────────────  the fork's pid  ────────────────────────  main

A fork is a child of the supervisor, like every other process of `baton up`: between it and `main`
there was a process that has ended, and the supervisor adopts orphans meanwhile. So it outlives
`main`, and without `main` workers are started as other processes are.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from batonlm.core.errors import BatonError

FORK_S = 120.0
"""The longest wait for a fork. The first one waits for the imports."""
_MESSAGE_BYTES = 1 << 16
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_STDOUT, _STDERR = 1, 2
_GO = b"!"
_UNTOLD = b"baton: untold"
"""The name of a process from its fork until it goes on, by which an orphan is known: 15 bytes at
most."""

_IMPORTED = (
    "batonlm.decode.servicer",
    "batonlm.engine.runner",
    "batonlm.prefill.service",
    "batonlm.worker.process",
)
"""What the workers' `__main__` import, which run in the forks."""

AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Whether this system can hand an orphan to another process than its first one."""


class ForksEnded(BatonError):
    """The process that forks has ended, or does not answer."""


class ForkServer:
    """The supervisor's side. Its owner starts `main`, with `stdin` as its stdin, closes that, and
    before `close` kills the process, which keeps its forks."""

    def __init__(self) -> None:
        self._control, self.stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._one = asyncio.Lock()
        self._starts: set[asyncio.Task[ForkedProcess]] = set()

    async def start(
        self, command: Sequence[str], protocol: asyncio.SubprocessProtocol
    ) -> ForkedProcess:
        """Starts `python -m` with these words. Raises ForksEnded. When it is cancelled, no process
        is left of it."""
        start = asyncio.create_task(self._start(command, protocol))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            start.add_done_callback(_close)
            raise

    async def close(self) -> None:
        """Ends what starts that were cancelled may have left, and waits for it."""
        for start in await asyncio.gather(*self._starts, return_exceptions=True):
            if isinstance(start, ForkedProcess):
                start.close()
                await start.reaped.wait()
        self._control.close()
        # When it was killed amid a fork, nobody told the pids of what was on its way, which ends.
        while untold := await asyncio.to_thread(_untold):
            for pid in untold:
                with suppress(ChildProcessError):
                    await asyncio.to_thread(os.waitpid, pid, 0)

    async def _start(
        self, command: Sequence[str], protocol: asyncio.SubprocessProtocol
    ) -> ForkedProcess:
        async with self._one:
            ends: list[tuple[int, int]] = []
            try:
                ends += (os.pipe(), os.pipe())
                pid = await self._fork(command, [write for _, write in ends])
                process = ForkedProcess(pid, protocol)
            except BaseException:
                for read, _ in ends:
                    os.close(read)
                raise
            finally:
                for _, write in ends:
                    os.close(write)
            for number, (read, _) in zip((_STDOUT, _STDERR), ends, strict=True):
                await process.read(number, read)
            return process

    async def _fork(self, command: Sequence[str], fds: list[int]) -> int:
        """Returns the fork's pid. Raises ForksEnded."""
        if self._control.fileno() < 0:
            raise ForksEnded("it has ended")
        loop = asyncio.get_running_loop()
        try:
            with _adopting():
                socket.send_fds(self._control, [json.dumps(command).encode()], fds)
                async with asyncio.timeout(FORK_S):
                    answer = await loop.sock_recv(self._control, _MESSAGE_BYTES)
        except (OSError, TimeoutError) as error:
            answer, why = b"", str(error) or "it does not answer"
        else:
            why = "it has ended"
        if not answer:
            # It finds the socket closed, and a fork that is on its way ends by itself.
            self._control.close()
            raise ForksEnded(why)
        return int(answer)


def _close(start: asyncio.Task[ForkedProcess]) -> None:
    if not start.cancelled() and start.exception() is None:
        start.result().close()


def _untold() -> list[int]:
    """Returns the children of this process that are called so."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                _, name, rest = re.split(
                    rb" \(|\) ", Path(entry.path, "stat").read_bytes(), maxsplit=2
                )
                if name == _UNTOLD and int(rest.split()[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it this process becomes the parent of its descendants whose parents end."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


class ForkedProcess(asyncio.SubprocessTransport):
    """A child process that asyncio did not start, with what `SubprocessTransport` has of one."""

    def __init__(self, pid: int, protocol: asyncio.SubprocessProtocol) -> None:
        super().__init__()
        self._pid, self._protocol = pid, protocol
        self._code: int | None = None
        self.reaped = asyncio.Event()
        self._pipes: list[asyncio.ReadTransport] = []
        self._loop = asyncio.get_running_loop()
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._loop.add_reader(self._fd, self._ended)

    async def read(self, number: int, fd: int) -> None:
        """Passes on what arrives at this end of the pipe that is the process's `number`."""
        pipe, _ = await self._loop.connect_read_pipe(
            lambda: _Pipe(self._protocol, number), os.fdopen(fd, "rb", buffering=0)
        )
        self._pipes.append(pipe)

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        return self._code

    def send_signal(self, signal: int) -> None:
        """Raises ProcessLookupError when the process has ended."""
        if self._code is not None:
            raise ProcessLookupError
        send_signal(self._fd, signal)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.kill()
        for pipe in self._pipes:
            pipe.close()

    def _ended(self) -> None:
        try:
            _, status = os.waitpid(self._pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            self._code = 255
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.reaped.set()
        self._protocol.process_exited()


send_signal = signal.pidfd_send_signal if AVAILABLE else os.kill


class _Pipe(asyncio.Protocol):
    def __init__(self, protocol: asyncio.SubprocessProtocol, number: int) -> None:
        self._protocol, self._number = protocol, number

    def data_received(self, data: bytes) -> None:
        self._protocol.pipe_data_received(self._number, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.pipe_connection_lost(self._number, exc)


def main() -> None:
    """Forks until the supervisor closes the socket; in a fork, runs its module."""
    # The supervisor imports this module too, and none of what engines are made of.
    from batonlm.rpc.lifecycle import die_with_parent

    die_with_parent()
    # Ctrl-C reaches all processes of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if words := _next_job(socket.socket(fileno=os.dup(0))):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = words
        # Its arguments stay those of the process that it is a fork of.
        _call_this(words[0].encode())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _next_job(control: socket.socket) -> list[str]:
    """Returns a job in the fork that is to do it, and an empty one in this process, at the end."""
    loaded = False
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
        if not data:
            return []
        words: list[str] = json.loads(data)
        if not loaded:
            _load(words)
            loaded = True
        gate, opener = os.pipe()
        found, finder = os.pipe()
        between = os.fork()
        if between == 0:
            _call_this(_UNTOLD)
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if pid:
                os.write(finder, b"%d" % pid)
                os._exit(0)
            os.close(opener)
            # Open when this process is the supervisor's child, and the supervisor knows it.
            if os.read(gate, 1) != _GO:
                os._exit(1)
            control.close()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, fd in enumerate((nothing, *fds)):
                os.dup2(fd, number)
            for fd in (nothing, gate, found, finder, *fds):
                os.close(fd)
            return words
        os.waitpid(between, 0)
        for fd in (gate, finder, *fds):
            os.close(fd)
        try:
            control.send(os.read(found, 32))
            os.write(opener, _GO)
        except OSError:
            return []  # Nobody waits for it any more.
        finally:
            os.close(found)
            os.close(opener)


def _call_this(name: bytes) -> None:
    """Gives the process its name, of which the system keeps 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name)


def _load(words: Sequence[str]) -> None:
    """Imports and computes what workers with these words need before their weights. What is wrong
    with the words or the model they report themselves.

    Raises SystemExit where another thread runs then: a fork would not have it, and what it had
    locked would stay locked.
    """
    from batonlm.engine.config import configure_threads
    from batonlm.rpc.config import load
    from batonlm.worker.engine import engine_config
    from batonlm.worker.hardware import settled
    from batonlm.worker.options import DecodeConfig, PrefillConfig

    module, *flags = words
    config = PrefillConfig if module.endswith("prefill") else DecodeConfig
    # Without a device nothing looks for GPUs, whose libraries do not survive a fork.
    options = replace(load(config, flags, prog=module), device="cpu")
    configure_threads(options.threads)
    for name in _IMPORTED:
        import_module(name)
    from batonlm.engine.footprint import foresee

    with suppress(BatonError), settled("decode", options) as chosen:
        foresee(engine_config(chosen.options))
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise SystemExit(f"error: after the imports {threads} threads run")
    # Collections in a fork would write to all pages with objects.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
