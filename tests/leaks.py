"""Asserts that real workers and routers hold nothing once their work is done.

Whoever starts them for tests registers them here (`Relay` does, and `worker` in
`services/worker/processes.py`); `tests/conftest.py` then looks after every test. Processes that
a test killed or froze are passed over.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import psutil

from batonlm.cli import state

IDLE_S = 120.0
"""A bound for liveness: a router's session may be kept for seconds after its stream broke."""

SOURCES: dict[object, Callable[[], Iterable[RunningWorker]]] = {}
"""By owner: the workers that live longer than a test."""
SHARED: dict[str, object] = {}
"""By the name of the fixture: owners that live longer than a file of tests. Their workers are asked
only after tests with that fixture: others cannot reach them, and there are thousands of those."""


@dataclass(frozen=True)
class RunningWorker:
    """metrics: its URL. token: of Baton's own processes, which a router with keys asks for.
    started: as `state.started` says it, of a process that may have ended long ago; "" where the
    pid cannot be another process's by now."""

    pid: int
    metrics: str
    token: str = ""
    started: str = ""

    def read(self) -> str:
        """Its metrics. Raises OSError."""
        shown = {"authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(self.metrics, headers=shown)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())


def held(text: str) -> dict[str, float]:
    """What a process's metrics say it holds; empty when it is idle and nothing leaked.

    A worker that loads its model serves metrics already and cannot tell yet.
    """
    kinds = re.findall(r'^baton_leaks\{kind="(\w+)"\} (\S+)$', text, re.MULTILINE)
    if len(kinds) <= 5:
        return {"something that it does not tell": 1.0}
    found = {kind: float(number) for kind, number in kinds}
    busy = re.findall(r"^baton_(attempts|requests_open) (\S+)$", text, re.MULTILINE)
    found |= {kind: float(number) for kind, number in busy}
    return {kind: number for kind, number in found.items() if number}


def check(worker: RunningWorker, idle_s: float = IDLE_S) -> None:
    """Waits until the process is idle and asserts that it holds nothing then."""
    deadline = time.monotonic() + idle_s
    told: object = "nothing"
    while runs(worker):
        try:
            told = held(worker.read())
        except (urllib.error.URLError, OSError) as error:
            told = error
        if told == {}:
            return
        assert time.monotonic() < deadline, f"process {worker.pid} still holds {told}"
        time.sleep(0.02)


def check_all(fixtures: Collection[str]) -> None:
    """fixtures: the names of those that the test had."""
    used = [owner for name, owner in SHARED.items() if name in fixtures]
    for owner, workers in list(SOURCES.items()):
        if owner in used or owner not in SHARED.values():
            for worker in workers():
                check(worker)


def runs(worker: RunningWorker) -> bool:
    if worker.started and worker.started != state.started(worker.pid):
        return False
    try:
        status = psutil.Process(worker.pid).status()
    except psutil.NoSuchProcess:
        return False
    return status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, psutil.STATUS_DEAD)
