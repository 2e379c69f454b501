"""Ranks as processes of this machine.

Each is started with its ends of three links and ends with them: a worker that dies, however it
does, leaves no rank. They find each other through a file without a name, which all of them have
open, and exchange what they compute on loopback only. Nothing is left on disk, and nothing listens
for anybody else. Of the GPUs that the worker sees, each rank sees the one of its number.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from time import monotonic

import msgspec

from batonlm.engine.gpus import VISIBLE
from batonlm.engine.ranks.link import Link
from batonlm.engine.ranks.runner import Place

STOP_S = 5.0
"""How long ranks, all together, may take to end before they are killed."""


class RankArguments(msgspec.Struct, frozen=True):
    """What a rank's process is started with. Descriptors are inherited."""

    rank: int
    tensor: int
    stages: int
    threads: int
    """Of torch."""
    spin: bool
    """Whether these cores are known to be the rank's alone, see `configure_threads`."""
    steps_fd: int
    copies_fd: int
    watch_fd: int
    store_fd: int
    """Of the file through which ranks find each other."""

    @property
    def place(self) -> Place:
        return Place(self.rank, self.tensor, self.stages)


class RankProcesses:
    """See `Ranks`. threads, spin: of each rank, see RankArguments."""

    def __init__(self, tensor: int, threads: int, *, stages: int = 1, spin: bool = False):
        self.tensor, self.stages = tensor, stages
        self.steps: list[Link] = []
        self.copies: list[Link] = []
        self.watched: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        store = os.memfd_create("baton-ranks", 0)
        try:
            for rank in range(tensor * stages):
                self._start(rank, threads, spin, store)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(store)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for link in (*self.steps, *self.copies, *self.watched):
            link.close()
        end = monotonic() + STOP_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - monotonic()))
            process.kill()
            process.wait()

    def _start(self, rank: int, threads: int, spin: bool, store: int) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        for links, (ours, _) in zip((self.steps, self.copies, self.watched), pairs, strict=True):
            links.append(Link(ours))
        try:
            fds = [theirs.fileno() for _, theirs in pairs]
            arguments = RankArguments(
                rank, self.tensor, self.stages, threads, spin, fds[0], fds[1], fds[2], store
            )
            command = [sys.executable, "-m", "batonlm.engine.ranks"]
            self._processes.append(
                subprocess.Popen(
                    [*command, msgspec.json.encode(arguments).decode()],
                    pass_fds=(*fds, store),
                    env=_environment(rank),
                    stdin=subprocess.DEVNULL,
                    # A worker's own output is read by its supervisor.
                    stdout=sys.stderr.fileno(),
                )
            )
        finally:
            for _, theirs in pairs:
                theirs.close()


def _environment(rank: int) -> dict[str, str]:
    gpus = os.environ.get(VISIBLE, "").split(",")
    return {**os.environ, VISIBLE: gpus[rank]} if rank < len(gpus) else dict(os.environ)
