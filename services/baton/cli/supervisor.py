"""Runs all processes of a layout, restarts a dead one with back-off; prints nothing itself.

What happens is told through `notify`: ("started", name, pid), ("loading", name, done, total),
("serving", name), ("restarting", name, exit code), ("ready",). The first start must succeed: a
process that ends before everything is ready ends the supervisor with `StartFailed`, because a wrong
flag does not heal.

Whatever state the children are in, `run` returns at most STOP_BOUND_S after `stop`.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from baton.cli import state
from baton.cli.layout import Layout, ProcessSpec
from baton.cli.log_file import CLOSE_S, LogFile
from baton.cli.process import Child
from baton.cli.scrape import met
from baton.core.errors import BatonError
from baton.rpc.peer_token import VARIABLE

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
HEALTHY_AFTER_S = 10.0
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 25.0
"""What routers, and then all others, get to end by themselves before they are killed."""
KILL_S = 3.0
"""What the kernel gets to end what was killed. A process that hangs in it may never end."""
STOP_BOUND_S = 2 * (STOP_TIMEOUT_S + KILL_S) + CLOSE_S
POLL_S = 0.05

Notify = Callable[..., None]


class StartFailed(BatonError):
    """A process ended, or took too long, before everything was ready."""


class Supervisor:
    """Owns the child processes. `run` returns when `stop` was called; no child outlives it.

    longest_backoff_s: before a process that keeps dying is started again. stop_timeout_s: as
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
        self._children: dict[str, Child] = {}
        self._serving = {spec.name: asyncio.Event() for spec in layout.processes}
        self._wanted = {spec.name: asyncio.Event() for spec in layout.processes}
        for wanted in self._wanted.values():
            wanted.set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = asyncio.Event()
        self._failure: StartFailed | None = None

    def stop(self) -> None:
        """Lets the processes end; the second time, kills those that have not."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def child(self, name: str) -> Child:
        """The present life of a process, or its last one."""
        return self._children[name]

    def withhold(self, name: str) -> None:
        """Once it has ended, a process is not started again until `release`."""
        self._wanted[name].clear()

    def release(self, name: str) -> None:
        self._wanted[name].set()

    def description(self) -> dict[str, Any]:
        """The JSON of `--detach`, with the supervisor's own pid."""
        return {
            "http": self._layout.http,
            "grpc": self._layout.grpc,
            **({"ca": self._layout.ca} if self._layout.ca else {}),
            "pid": os.getpid(),
            "processes": [
                {
                    "role": spec.role,
                    "pid": self._children[spec.name].pid,
                    "grpc": spec.grpc,
                    "metrics": self._layout.metrics_url(spec),
                }
                for spec in self._layout.processes
                if spec.name in self._children
            ],
        }

    async def run(self) -> None:
        """Runs until stopped. Raises StartFailed, also where another runs with this folder."""
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
        keepers = [asyncio.create_task(self._keep(spec, log)) for spec in self._layout.processes]
        watcher = asyncio.create_task(self._watch_start())
        try:
            await self._stop.wait()
        finally:
            self._stop.set()
            # Before the children are ended, so that no new one is started meanwhile.
            for task in (watcher, *keepers):
                task.cancel()
            await asyncio.gather(watcher, *keepers, return_exceptions=True)
            await self._end_children()
            log.close()

    async def _keep(self, spec: ProcessSpec, log: LogFile) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            why, code = await self._live(spec, log)
            if self._stop.is_set():
                return
            if not self._ready.is_set():
                self._fail(f"{spec.name} did not start: {why}")
                return
            self._notify("restarting", spec.name, code)
            backoff = (
                FIRST_BACKOFF_S
                if time.monotonic() - began > HEALTHY_AFTER_S
                else min(backoff * 2, self._longest_backoff_s)
            )
            await asyncio.sleep(backoff)
            await self._wanted[spec.name].wait()

    async def _live(self, spec: ProcessSpec, log: LogFile) -> tuple[str, int]:
        """One life of a process, to its end: why it ended, in words, and its exit code."""
        try:
            child = await Child.start(
                spec,
                log,
                self._layout.threads,
                lambda name, done, total: self._notify("loading", name, done, total),
                {VARIABLE: self._layout.peer_token},
            )
        except OSError as error:
            return f"it could not be started: {error.strerror}", 1
        self._children[spec.name] = child
        self._notify("started", spec.name, child.pid)
        if self._ready.is_set():
            # Without room on the disk it is not written: `baton down` does without it.
            with suppress(OSError):
                self._write_state()
        serving = asyncio.create_task(self._announce(child))
        try:
            code = await child.wait()
        finally:
            serving.cancel()
        return child.last_words[-1] if child.last_words else f"it ended with code {code}", code

    async def _announce(self, child: Child) -> None:
        await child.serving.wait()
        self._serving[child.spec.name].set()
        self._notify("serving", child.spec.name)

    async def _watch_start(self) -> None:
        """Ready is when every process serves and every router has met every worker."""
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
        """Raises OSError."""
        said = self.description()
        processes = [each | state.process(each["pid"]) for each in said["processes"]]
        token = self._layout.peer_token
        state.write(said | state.process(os.getpid()) | {"token": token, "processes": processes})

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = StartFailed(message)
        self._stop.set()

    async def _end_children(self) -> None:
        """Routers first, so that no request meets a missing worker; then the rest; then force."""
        children = list(self._children.values())
        routers = [child for child in children if child.spec.role == "router"]
        for group in (routers, [child for child in children if child not in routers]):
            if group:
                await self._end(group)

    async def _end(self, group: Sequence[Child]) -> None:
        for child in group:
            child.terminate()
        waits = [asyncio.create_task(child.wait()) for child in group]
        all_ended = asyncio.gather(*waits)
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait(
            (all_ended, hurry),
            timeout=self._stop_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurry.cancel()
        if not all_ended.done():
            for child in group:
                child.kill()
            await asyncio.wait((all_ended,), timeout=KILL_S)
        if not all_ended.done():
            all_ended.cancel()
        await asyncio.gather(all_ended, hurry, return_exceptions=True)
        for child in group:
            child.close()


async def _wait_for_routers(layout: Layout) -> None:
    """Returns when every router has met every worker.

    A router is healthy without a prefill worker, because decode can prefill; whoever asks then
    would get an answer, but not the relay that was started.
    """
    workers = Counter(spec.role for spec in layout.processes if spec.role != "router")
    urls = [layout.metrics_url(spec) for spec in layout.processes if spec.role == "router"]
    trust = ssl.create_default_context(cafile=layout.ca) if layout.ca else None
    while True:
        # One look at a time in a thread: a thread that waits longer would keep `run` from ending.
        for url in list(urls):
            if workers <= await asyncio.to_thread(met, url, trust, layout.peer_token):
                urls.remove(url)
        if not urls:
            return
        await asyncio.sleep(POLL_S)
