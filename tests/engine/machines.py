"""A second machine: a network namespace with a cable to this one, and processes of its own.

It shares the model's files and nothing else: no memory can be found by a process id there.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest

HERE, THERE = "10.78.0.1", "10.78.0.2"
TOKEN = "a token of a group of two"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass(frozen=True)
class SecondMachine:
    namespace: str
    cable: str
    """This machine's end."""

    def start(self, leader: str, token: str = TOKEN) -> subprocess.Popen[bytes]:
        """`baton-ranks` as machine 1."""
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self.namespace),
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, "-m", "batonlm.worker.machine", "--leader", leader),
                *("--machine", "1", "--device", "cpu", "--log-level", "error"),
            ],
            env={**os.environ, "BATON_RANKS_TOKEN": token},
        )

    def cut(self) -> None:
        _ip(f"link set {self.cable} down")


@contextmanager
def second_machine() -> Iterator[SecondMachine]:
    """Nothing of it stays. There is one at a time, also of other processes: its addresses are
    fixed."""
    with (Path(gettempdir()) / "baton-second-machine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _second_machine()


def _second_machine() -> Iterator[SecondMachine]:
    machine = SecondMachine("baton-machine", "baton-cable")
    inside = f"-n {machine.namespace}"
    # What a process left that was killed.
    _remove(machine)
    try:
        _ip(f"netns add {machine.namespace}")
        _ip(f"link add {machine.cable} type veth peer name k0 netns {machine.namespace}")
        _ip(f"addr add {HERE}/24 dev {machine.cable}")
        _ip(f"link set {machine.cable} up")
        _ip(f"{inside} addr add {THERE}/24 dev k0")
        _ip(f"{inside} link set k0 up")
        _ip(f"{inside} link set lo up")
        yield machine
    finally:
        _remove(machine)


def _remove(machine: SecondMachine) -> None:
    for command in (f"netns del {machine.namespace}", f"link del {machine.cable}"):
        subprocess.run(["ip", *command.split()], check=False, capture_output=True, timeout=120)


def ranks_below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks that a second machine runs, in their order."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        # Others come and go there.
        with suppress(psutil.NoSuchProcess):
            if "batonlm.engine.ranks" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda child: child.pid)


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=120)
