"""A sender's and a receiver's process, and the operations of an experiment on them."""

from __future__ import annotations

import itertools
import json
import os
import random
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
from types import TracebackType
from typing import Any

from baton_loadtest.chaos.sides import Settings
from batonlm.core.errors import BatonError
from batonlm.rpc.server import PARENT_VARIABLE

PATIENCE_S = 60.0
"""Time limit for what must happen; if it is exceeded the experiment has failed."""

PeerMessage = dict[str, Any]


class PeerGone(BatonError):
    """The process ended before it answered."""


class Broken(BatonError):
    """A required event did not happen."""


class Peer:
    """One run of one side's process, which an experiment commands, freezes, thaws and ends."""

    def __init__(self, role: str, settings: Settings, ucx_tls: str) -> None:
        self.role = role
        self._waiting: dict[int, Future[PeerMessage]] = {0: Future()}
        self._numbers = itertools.count(1)
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        if settings.memory == "device":
            # Without a GPU the digest's kernel is interpreted.
            environment["TRITON_INTERPRET"] = "1"
        if ucx_tls:
            environment["UCX_TLS"] = ucx_tls
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "baton_loadtest.chaos.sides",
                role,
                json.dumps(asdict(settings)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        hello = self._waiting[0]
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        greeting = hello.result(PATIENCE_S)
        self.instance_id, self.address = greeting["instance_id"], greeting["address"]

    def begin(self, do: str, **values: object) -> Future[PeerMessage]:
        """Sends a command. Returns the future of its answer, or of PeerGone."""
        number, answer = next(self._numbers), Future[PeerMessage]()
        self._waiting[number] = answer
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"n": number, "do": do, **values}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            # The reading thread may have noticed first; the side that pops a request answers it.
            if self._waiting.pop(number, None) is not None:
                answer.set_exception(PeerGone(f"the {self.role} is gone"))
        return answer

    def ask(self, do: str, **values: object) -> PeerMessage:
        """Sends a command and returns the answer. Raises PeerGone, Broken."""
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
            message = json.loads(line)
            answer = self._waiting.pop(message.pop("n"), None)
            if answer is None:
                continue
            if "failed" in message:
                answer.set_exception(Broken(f"the {self.role}: {message['failed']}"))
            else:
                answer.set_result(message)
        gone = PeerGone(f"the {self.role} ended with code {self._process.wait()}")
        while self._waiting:
            self._waiting.popitem()[1].set_exception(gone)


def result(answer: Future[PeerMessage], what: str) -> PeerMessage:
    try:
        return answer.result(PATIENCE_S)
    except TimeoutError:
        raise Broken(f"waited {PATIENCE_S:.0f} s for {what}") from None


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    """Waits for a condition. Raises Broken if it does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.005)


class World:
    """Both processes. They start and end with its block."""

    def __init__(self, settings: Settings, draw: random.Random, ucx_tls: str = "") -> None:
        self.settings, self.draw, self.ucx_tls = settings, draw, ucx_tls
        self.peers: dict[str, Peer] = {}
        for role in ("sender", "receiver"):
            self.start(role)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for peer in self.peers.values():
            peer.end()

    @property
    def sender(self) -> Peer:
        return self.peers["sender"]

    @property
    def receiver(self) -> Peer:
        return self.peers["receiver"]

    def start(self, role: str) -> None:
        """Starts a new process in place of the previous one."""
        if role in self.peers:
            self.peers.pop(role).end()
        self.peers[role] = Peer(role, self.settings, self.ucx_tls)

    def new_id(self) -> str:
        return self.draw.randbytes(16).hex()

    def offer(self, handover_id: str, deadline_s: float = PATIENCE_S, **more: Any) -> PeerMessage:
        return self.sender.ask(
            "offer",
            id=handover_id,
            receiver=self.receiver.instance_id,
            positions=self.settings.positions,
            deadline_s=deadline_s,
            **more,
        )

    def collect(
        self, handover_id: str, deadline_s: float = PATIENCE_S, **more: Any
    ) -> Future[PeerMessage]:
        return self.receiver.begin(
            "collect",
            id=handover_id,
            instance_id=self.sender.instance_id,
            address=self.sender.address,
            positions=self.settings.positions,
            deadline_s=deadline_s,
            **more,
        )

    def hand_over(
        self, *, sender: PeerMessage | None = None, receiver: PeerMessage | None = None
    ) -> PeerMessage:
        """Runs one hand-over to its end and returns the receiver's answer."""
        handover_id = self.new_id()
        offered = self.offer(handover_id, **(sender or {}))
        message = result(self.collect(handover_id, **(receiver or {})), "a hand-over to end")
        return {**message, "given": offered["injected"]}

    def settle(self) -> None:
        """Returns when both are idle with all buffers free. Raises Broken if that does not
        happen."""

        states: dict[str, PeerMessage] = {}

        def settled() -> bool:
            states.update((role, peer.ask("state")) for role, peer in self.peers.items())
            return all(s["idle"] and s["free"] == s["buffers"] for s in states.values())

        try:
            until(settled, "both sides to be idle with full rings")
        except Broken as error:
            raise Broken(f"{error.message}: {states}") from None


def right(message: PeerMessage, positions: int) -> bool:
    """Returns whether everything was received and every byte is right."""
    return (message["outcome"], message["unpacked"], message["wrong"], message["changed"]) == (
        "completed", positions, 0, 0
    )  # fmt: skip
