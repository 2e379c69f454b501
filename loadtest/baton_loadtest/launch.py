"""Starts what is measured: a whole Baton, one process of it, or a function in its own process.

A whole Baton is planned and supervised as by `baton up`, in its own state folder. All processes end
with their `async with` block.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from baton_loadtest.child import LONGEST_LINE
from batonlm.cli.http_client import scrape
from batonlm.cli.layout import Layout, UpOptions, plan
from batonlm.cli.ports import free_row
from batonlm.cli.supervisor import Notify, Supervisor
from batonlm.core.errors import BatonError
from batonlm.rpc.children import LONGEST_BACKOFF_S
from batonlm.rpc.server import PARENT_VARIABLE

ENGINE_CORE, OTHER_CORE = "0", "1"
"""Cores of the engines and of everything else, for benchmarks that pin them."""

START_S = 60.0
"""Time limit for a process to serve."""

END_S = 60.0
"""Time limit for a function's process to end by itself; then it is killed."""


class ContenderFailed(BatonError):
    """A process ended without an answer, or exceeded its time limit."""


def say(text: str) -> None:
    """Prints a line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def environment(**variables: object) -> Iterator[None]:
    """Sets environment variables within the block, for the processes that it starts."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cores() -> list[int]:
    """The cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pinned(*allowed: int | None) -> list[str]:
    """Returns the start of a command line that pins a process to these cores, if that is possible;
    empty without a core, or with None among them."""
    if (
        not allowed
        or None in allowed
        or not hasattr(os, "sched_getaffinity")
        or not shutil.which("taskset")
    ):
        return []
    return ["taskset", "-c", ",".join(map(str, allowed))]


def stay_off_the_engine() -> None:
    """Pins this process, and those it starts without a pin, to OTHER_CORE."""
    os.sched_setaffinity(0, {int(OTHER_CORE)})


def check_cpu_clock() -> None:
    """Raises BatonError if `cpu_spent_s` does not work here."""
    if sys.platform != "linux":
        raise BatonError("another process's processor time can be read on Linux only")


def cpu_spent_s(pid: int) -> float:
    """Returns the CPU time of all threads of a process so far, on Linux. Raises OSError."""
    # The id of another process's CPU clock, as from clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


def resident_bytes(pid: int) -> int:
    """Returns a process's resident memory; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class RunningBaton:
    """A running Baton."""

    layout: Layout
    supervisor: Supervisor

    @property
    def routers(self) -> list[str]:
        """The HTTP addresses of the routers, as host:port."""
        return [spec.metrics for spec in self.layout.processes if spec.role == "router"]

    def pids(self, *roles: str) -> dict[str, int]:
        """Process ids by name, of these roles or of all."""
        return {
            spec.name: self.supervisor.child(spec.name).pid
            for spec in self.layout.processes
            if not roles or spec.role in roles
        }

    def spent_s(self) -> dict[str, float]:
        """CPU time so far, by process name."""
        found = {}
        for name, pid in self.pids().items():
            with suppress(OSError):
                found[name] = cpu_spent_s(pid)
        return found

    async def metrics(self, name: str = "router-0") -> dict[str, float]:
        """Returns the metrics of one process. Raises OSError if it does not answer."""
        spec = next(spec for spec in self.layout.processes if spec.name == name)
        url, token = self.layout.metrics_url(spec), self.layout.peer_token
        return await asyncio.to_thread(scrape, url, key=token)


@asynccontextmanager
async def fleet(
    options: UpOptions, *, pin: bool = False, change: Callable[[Layout], Layout] = lambda it: it
) -> AsyncIterator[RunningBaton]:
    """Starts a whole Baton on free ports.

    pin: run engines on ENGINE_CORE with one thread each, and everything else on OTHER_CORE. change:
    applied to the planned processes. Raises StartFailed.
    """
    first = free_row(2 * options.routers)
    options = replace(options, http_port=first, grpc_port=first + options.routers)
    if pin:
        options = replace(options, threads=1, engine_cpus=ENGINE_CORE, other_cpus=OTHER_CORE)
    layout = change(plan(options))
    with tempfile.TemporaryDirectory() as folder, environment(XDG_STATE_HOME=folder):
        async with supervised(layout) as supervisor:
            yield RunningBaton(layout, supervisor)


@asynccontextmanager
async def supervised(
    layout: Layout,
    notify: Notify = lambda *_: None,
    *,
    longest_backoff_s: float = LONGEST_BACKOFF_S,
) -> AsyncIterator[Supervisor]:
    """Runs a planned layout. notify: see Supervisor."""
    ready = asyncio.Event()

    def note(what: str, *details: object) -> None:
        if what == "ready":
            ready.set()
        notify(what, *details)

    supervisor = Supervisor(layout, note, longest_backoff_s=longest_backoff_s)
    running = asyncio.create_task(supervisor.run())
    try:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            await running
        yield supervisor
    finally:
        supervisor.stop()
        await asyncio.wait({running})


@dataclass(frozen=True, slots=True)
class BatonProcess:
    """One running process of Baton."""

    pid: int
    announced: dict[str, Any]
    """The JSON line that it printed when it was ready."""

    def spent_s(self) -> float:
        """CPU time so far."""
        return cpu_spent_s(self.pid)


@asynccontextmanager
async def process(
    role: str, *flags: str, core: int | None = None, constants: str = ""
) -> AsyncIterator[BatonProcess]:
    """Starts `python -m batonlm.ROLE`. Raises ContenderFailed if it does not serve.

    constants: to replace, as `batonlm.testing.worker` takes them; only of a worker.
    """
    module = ["batonlm.testing.worker", role] if constants else [f"batonlm.{role}"]
    command = [*pinned(core), sys.executable, "-m", *module, "--log-level=warning", *flags]
    own = {PARENT_VARIABLE: str(os.getpid()), "BATON_TEST_CONSTANTS": constants}
    started = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **own}
    )
    assert started.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            while line := await started.stdout.readline():
                # Before it serves, it says in which part of its start it is.
                if "role" in (announcement := json.loads(line)):
                    break
        if not line:
            raise ContenderFailed(f"the {role} did not start")
        yield BatonProcess(started.pid, announcement)
    finally:
        with suppress(ProcessLookupError):
            started.kill()
        await started.wait()


class Peer:
    """A function in its own process (`child`), which receives commands."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[str]) -> None:
        self._name, self._process, self._errors = name, process, errors
        self._turn = asyncio.Lock()

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Sends one command and returns the answer; progress goes to stderr.

        Raises ContenderFailed, with the last line of the process's stderr, if it has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        async with self._turn:
            with suppress(ConnectionError):
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
                await self._process.stdin.drain()
                while line := await self._process.stdout.readline():
                    message = json.loads(line)
                    if "answer" in message:
                        answer: dict[str, Any] = message["answer"]
                        return answer
                    say(f"  {message['progress']}")
        await self._process.wait()
        self._errors.seek(0)
        last_line = (self._errors.read().strip().splitlines() or ["ended without an answer"])[-1]
        raise ContenderFailed(f"{self._name}: {last_line}")


@asynccontextmanager
async def peer(
    function: Callable[..., object], *allowed: int | None, threads: int | None = None
) -> AsyncIterator[Peer]:
    """Runs a function in its own process on these cores; the process ends with the block.

    threads: number of OpenMP threads.
    """
    variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as errors:
        started = await asyncio.create_subprocess_exec(
            *pinned(*allowed),
            *(sys.executable, "-m", "baton_loadtest.child"),
            *(function.__module__, function.__name__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **variables},
            limit=LONGEST_LINE,
        )
        assert started.stdin is not None
        try:
            yield Peer(function.__name__, started, errors)
            started.stdin.close()
            async with asyncio.timeout(END_S):
                await started.wait()
        finally:
            with suppress(ProcessLookupError):
                started.kill()
            await started.wait()


def call(
    function: Callable[[dict[str, Any]], dict[str, Any]],
    job: dict[str, Any],
    *,
    threads: int,
    deadline_s: float,
) -> dict[str, Any]:
    """Returns the function's result for a job, from a new process on the first `threads` cores.

    Raises ContenderFailed if it fails or takes too long; the process has ended then.
    """

    async def ask() -> dict[str, Any]:
        allowed = cores()[:threads]
        async with peer(function, *allowed, threads=threads) as process:
            return await process.ask(**job)

    async def ask_in_time() -> dict[str, Any]:
        try:
            return await asyncio.wait_for(ask(), deadline_s)
        except TimeoutError:
            text = f"{function.__name__}: not done after {deadline_s:.0f} s"
            raise ContenderFailed(text) from None

    return asyncio.run(ask_in_time())
