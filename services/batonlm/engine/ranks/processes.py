"""Ranks as processes of this machine.

Each is started with its ends of three links and ends with them: a worker that dies, however it
does, leaves no rank. Where a worker's ranks are all here, they find each other through a file
without a name, which all of them have open, and exchange what they compute on loopback only.
Nothing is left on disk, and nothing listens for anybody else. Of the GPUs that this process sees,
each rank sees the one of its number.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

import msgspec

from batonlm.engine.gpus import VISIBLE
from batonlm.engine.ranks.link import Link
from batonlm.engine.ranks.runner import FarMemory, Place

STOP_S = 5.0
"""How long ranks, all together, may take to end before they are killed."""
LOOPBACK = "127.0.0.1"


class GroupArguments(msgspec.Struct, frozen=True):
    """What all ranks of a worker are started with."""

    tensor: int
    stages: int
    machines: int
    """A divisor of `stages`."""
    threads: int
    """Of torch, of each rank."""
    spin: bool
    """Whether these cores are known to be the rank's alone, see `configure_threads`."""

    @property
    def ranks_of_a_machine(self) -> int:
        return self.tensor * self.stages // self.machines

    def ranks_of(self, machine: int) -> range:
        first = machine * self.ranks_of_a_machine
        return range(first, first + self.ranks_of_a_machine)


class StoreArguments(msgspec.Struct, frozen=True):
    """Through which store a machine's ranks find the others, and where they listen for them."""

    fd: int
    """Inherited; -1 where there is none. Of a file; or, with an address, of the socket at which
    rank 0 serves the store."""
    host: str
    """Where rank 0 serves the store; "" for the file."""
    port: int
    listen: str
    """This machine's own address."""


class RankArguments(msgspec.Struct, frozen=True):
    """What a rank's process is started with. Descriptors are inherited."""

    rank: int
    group: GroupArguments
    store: StoreArguments
    steps_fd: int
    copies_fd: int
    watch_fd: int

    @property
    def place(self) -> Place:
        return Place(self.rank, self.group.tensor, self.group.stages)


class Processes:
    """A machine's ranks, started with `ends`, of each rank its ends of the three links. Closes
    these ends, whether or not it raises."""

    def __init__(
        self,
        group: GroupArguments,
        ranks: range,
        ends: Sequence[Sequence[socket.socket]],
        store: StoreArguments,
    ):
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, own in zip(ranks, ends, strict=True):
                fds = [end.fileno() for end in own]
                arguments = RankArguments(rank, group, store, fds[0], fds[1], fds[2])
                inherited = [*fds, store.fd] if store.fd >= 0 else fds
                self._start(arguments, inherited, number=rank - ranks.start)
        except BaseException:
            self.close()
            raise
        finally:
            for own in ends:
                for end in own:
                    end.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """To be called once their links have ended."""
        end = monotonic() + STOP_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - monotonic()))
            process.kill()
            process.wait()

    def _start(self, arguments: RankArguments, inherited: list[int], number: int) -> None:
        command = [sys.executable, "-m", "batonlm.engine.ranks"]
        self._processes.append(
            subprocess.Popen(
                [*command, msgspec.json.encode(arguments).decode()],
                pass_fds=inherited,
                env=_environment(number),
                stdin=subprocess.DEVNULL,
                # A worker's own output is read by its supervisor.
                stdout=sys.stderr.fileno(),
            )
        )


class RankProcesses:
    """See `Ranks`: all on this machine. threads, spin: of each rank, see GroupArguments."""

    def __init__(self, tensor: int, threads: int, *, stages: int = 1, spin: bool = False):
        self.tensor, self.stages = tensor, stages
        self.steps: list[Link] = []
        self.copies: list[Link] = []
        self.watched: list[Link] = []
        self.far: list[FarMemory] = []
        group = GroupArguments(tensor, stages, 1, threads, spin)
        ends: list[list[socket.socket]] = []
        for _ in group.ranks_of(0):
            pairs = [socket.socketpair() for _ in range(3)]
            ends.append([theirs for _, theirs in pairs])
            for links, (ours, _) in zip(
                (self.steps, self.copies, self.watched), pairs, strict=True
            ):
                links.append(Link(ours))
        store = os.memfd_create("baton-ranks", 0)
        try:
            self._processes = Processes(
                group, group.ranks_of(0), ends, StoreArguments(store, "", 0, LOOPBACK)
            )
        except BaseException:
            self._close_links()
            raise
        finally:
            os.close(store)

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

    def close(self) -> None:
        self._close_links()
        self._processes.close()

    def _close_links(self) -> None:
        for link in (*self.steps, *self.copies, *self.watched):
            link.close()


def environment() -> dict[str, str]:
    """This process's, without its options: processes that it starts take their own, and some of
    these are secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def _environment(number: int) -> dict[str, str]:
    """number: of the rank among those of this machine."""
    own = environment()
    gpus = own.get(VISIBLE, "").split(",")
    return {**own, VISIBLE: gpus[number]} if number < len(gpus) else own
