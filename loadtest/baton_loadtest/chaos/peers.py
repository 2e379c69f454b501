"""A side's process as an experiment sees it: started, asked, frozen, thawed, ended."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.rpc.lifecycle import PARENT_VARIABLE
from baton_loadtest.chaos.settings import Settings

PATIENCE_S = 60.0
"""For what must happen; an experiment that waits longer has failed."""

Said = dict[str, Any]


class PeerGone(BatonError):
    """The process ended before it answered."""


class Broken(BatonError):
    """Something that must happen did not."""


class Peer:
    """One life of one side's process."""

    def __init__(self, role: str, settings: Settings, ucx_tls: str) -> None:
        self.role = role
        self._waiting: dict[int, Future[Said]] = {0: Future()}
        self._numbers = itertools.count(1)
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        if ucx_tls:
            environment["UCX_TLS"] = ucx_tls
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton_loadtest.chaos.peer", role, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        hello = self._waiting[0]
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        told = hello.result(PATIENCE_S)
        self.instance_id, self.address = told["instance_id"], told["address"]

    def begin(self, do: str, **values: object) -> Future[Said]:
        """Its answer to come, or PeerGone."""
        number, answer = next(self._numbers), Future[Said]()
        self._waiting[number] = answer
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"n": number, "do": do, **values}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            # The thread that reads may have found out first: it answers whom it takes out.
            if self._waiting.pop(number, None) is not None:
                answer.set_exception(PeerGone(f"the {self.role} is gone"))
        return answer

    def ask(self, do: str, **values: object) -> Said:
        """Raises PeerGone, Broken."""
        return result(self.begin(do, **values), f"the {self.role} to answer {do}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def frozen(self) -> bool:
        try:
            status = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join(PATIENCE_S)
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            answer = self._waiting.pop(said.pop("n"), None)
            if answer is None:
                continue
            if "failed" in said:
                answer.set_exception(Broken(f"the {self.role}: {said['failed']}"))
            else:
                answer.set_result(said)
        gone = PeerGone(f"the {self.role} ended with code {self._process.wait()}")
        while self._waiting:
            self._waiting.popitem()[1].set_exception(gone)


def result(answer: Future[Said], what: str) -> Said:
    try:
        return answer.result(PATIENCE_S)
    except TimeoutError:
        raise Broken(f"waited {PATIENCE_S:.0f} s for {what}") from None


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    """Raises Broken when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.005)
