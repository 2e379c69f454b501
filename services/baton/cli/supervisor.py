"""Runs all processes of a layout, restarts a dead one with back-off; prints nothing itself.

What happens is told through `notify`: ("started", name, pid), ("loading", name, done, total),
("serving", name), ("restarting", name, exit code), ("ready",). The first start must succeed: a
process that ends before everything is ready ends the supervisor with `StartFailed`, because a wrong
flag does not heal.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.cli import state
from baton.cli.layout import Layout, ProcessSpec
from baton.cli.process import Child
from baton.cli.scrape import met
from baton.core.errors import BatonError

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
HEALTHY_AFTER_S = 10.0
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 25.0

Notify = Callable[..., None]


class StartFailed(BatonError):
    """A process ended, or took too long, before everything was ready."""


class Supervisor:
    """Owns the child processes. `run` returns when `stop` was called; no child outlives it.

    longest_backoff_s: before a process that keeps dying is started again.
    """

    def __init__(
        self, layout: Layout, notify: Notify, *, longest_backoff_s: float = LONGEST_BACKOFF_S
    ) -> None:
        self._layout = layout
        self._notify = notify
        self._longest_backoff_s = longest_backoff_s
        self._children: dict[str, Child] = {}
        self._serving = {spec.name: asyncio.Event() for spec in layout.processes}
        self._wanted = {spec.name: asyncio.Event() for spec in layout.processes}
        for wanted in self._wanted.values():
            wanted.set()
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self._failure: StartFailed | None = None

    def stop(self) -> None:
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
        """Runs until stopped. Raises StartFailed."""
        state.folder().mkdir(parents=True, exist_ok=True)
        state.log_file().write_bytes(b"")
        keepers = [asyncio.create_task(self._keep(spec)) for spec in self._layout.processes]
        watcher = asyncio.create_task(self._watch_start())
        try:
            await self._stop.wait()
        finally:
            self._stop.set()
            watcher.cancel()
            await self._end_children()
            for task in keepers:
                task.cancel()
            await asyncio.gather(watcher, *keepers, return_exceptions=True)
            state.remove(os.getpid())
        if self._failure is not None:
            raise self._failure

    async def _keep(self, spec: ProcessSpec) -> None:
        backoff = FIRST_BACKOFF_S
        while not self._stop.is_set():
            began = time.monotonic()
            child = await Child.start(
                spec,
                state.log_file(),
                self._layout.threads,
                lambda name, done, total: self._notify("loading", name, done, total),
            )
            self._children[spec.name] = child
            self._notify("started", spec.name, child.pid)
            if self._ready.is_set():
                state.write(self.description())
            serving = asyncio.create_task(self._announce(child))
            try:
                code = await child.wait()
            finally:
                serving.cancel()
            if self._stop.is_set():
                return
            if not self._ready.is_set():
                words = child.last_words[-1] if child.last_words else f"it ended with code {code}"
                self._fail(f"{spec.name} did not start: {words}")
                return
            self._notify("restarting", spec.name, code)
            backoff = (
                FIRST_BACKOFF_S
                if time.monotonic() - began > HEALTHY_AFTER_S
                else min(backoff * 2, self._longest_backoff_s)
            )
            await asyncio.sleep(backoff)
            await self._wanted[spec.name].wait()

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
                await asyncio.to_thread(_wait_for_routers, self._layout, START_TIMEOUT_S)
        except TimeoutError:
            self._fail(f"not ready after {START_TIMEOUT_S:.0f} s; see {state.log_file()}")
            return
        self._ready.set()
        state.write(self.description())
        self._notify("ready")

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = StartFailed(message)
        self._stop.set()

    async def _end_children(self) -> None:
        """Routers first, so that no request meets a missing worker; then the rest; then force."""
        children = list(self._children.values())
        routers = [child for child in children if child.spec.role == "router"]
        for group in (routers, [child for child in children if child not in routers]):
            for child in group:
                child.terminate()
            if not group:
                continue
            waits = [asyncio.create_task(child.wait()) for child in group]
            _, pending = await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
            if pending:
                for child in group:
                    child.kill()
                await asyncio.wait(pending)


def _wait_for_routers(layout: Layout, timeout_s: float) -> None:
    """Returns when every router has met every worker. Raises TimeoutError. Blocks.

    A router is healthy without a prefill worker, because decode can prefill; whoever asks then
    would get an answer, but not the relay that was started.
    """
    workers = Counter(spec.role for spec in layout.processes if spec.role != "router")
    urls = [layout.metrics_url(spec) for spec in layout.processes if spec.role == "router"]
    trust = ssl.create_default_context(cafile=layout.ca) if layout.ca else None
    deadline = time.monotonic() + timeout_s
    while urls := [url for url in urls if not workers <= met(url, trust)]:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)
