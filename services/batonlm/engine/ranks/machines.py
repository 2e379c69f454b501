"""Ranks on several machines: stages are shared out, the ranks of one stage stay together.

The worker is on the first machine, and its own ranks with it. On each other machine `join` connects
to it, learns the group's shape, and starts that machine's ranks with their links to the worker.
Plans cross the network once for each rank; a payload crosses once for each machine, with that
machine's layers alone, and lies there in memory that the machine's ranks map.

Everything ends with everything else: a rank, a machine and the worker watch each other, so that no
part of a group outlives another one.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from batonlm.core.errors import Internal
from batonlm.engine.ranks.link import MAX_MESSAGE_BYTES, Link, LinkLost, watch
from batonlm.engine.ranks.processes import GroupArguments, Processes, StoreArguments
from batonlm.engine.ranks.runner import STEP_S
from batonlm.engine.ranks.shared import Scratch, SharedPlace
from batonlm.engine.ranks.tcp import RANK_KINDS, Address, LinkKind, LinkName, connect, gather

log = logging.getLogger(__name__)

JOIN_S = 7200.0
"""Longest time in which all machines of a group find each other: one may fetch the model first."""


class Shape(msgspec.Struct, frozen=True, tag=True):
    """What a machine is sent first."""

    group: GroupArguments
    store_port: int
    """Where rank 0 serves the store, at the worker's address."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Hold memory for a payload, with these bytes of it."""

    total_bytes: int
    offset: int
    data: bytes


class Get(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes of the payload that you hold."""

    offset: int
    size: int


class MemoryHeld(msgspec.Struct, frozen=True, tag=True):
    place: SharedPlace
    """Of the whole payload."""


_encode = msgspec.msgpack.Encoder().encode
_shape = msgspec.msgpack.Decoder(Shape).decode
_held = msgspec.msgpack.Decoder(MemoryHeld).decode
_order: msgspec.msgpack.Decoder[Put | Get] = msgspec.msgpack.Decoder(Put | Get)


class MachineMemory:
    """See `FarMemory`."""

    def __init__(self, link: Link, ranks: range):
        self.link = link
        self.ranks = ranks

    def hold(self, total_bytes: int, offset: int, data: bytes | memoryview) -> SharedPlace:
        self.link.send(_encode(Put(total_bytes, offset, bytes(data))), STEP_S)
        return _held(self.link.receive(STEP_S)).place

    def read(self, offset: int, out: memoryview) -> None:
        self.link.send(_encode(Get(offset, out.nbytes)), STEP_S)
        out[:] = self.link.receive(STEP_S)


class Order(msgspec.Struct, frozen=True):
    """Which processes a launcher is to start: as machines 1 and up, each to join the leader."""

    leader: Address
    machines: int
    """With the worker's own."""
    ranks_of_a_machine: int
    """Each on a GPU of its own, or on cores of its own."""


class Launcher(Protocol):
    """Starts `baton-ranks`, or what does the same, on a group's other machines.

    Real: `Elsewhere`, and `batonlm.worker.placement.RayLauncher`.
    """

    @property
    def watched(self) -> Sequence[Link]:
        """For `link.watch`: one that ends says that a machine has."""

    def start(self, order: Order) -> None:
        """Does not wait for the machines. Called once, when the leader listens."""

    def check(self) -> None:
        """Raises InvalidArgument, naming a field, or Internal when the machines cannot come."""

    def close(self) -> None:
        """Ends what it has started. Idempotent."""


class Elsewhere:
    """The machines are started by somebody else: a LeaderWorkerSet, systemd, an operator."""

    watched: Sequence[Link] = ()

    def start(self, order: Order) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class RankMachines:
    """See `Ranks`. Waits for the other machines, up to JOIN_S.

    threads, spin: of each rank. listen: this machine's address for the others, where it waits for
    them; nothing listens there any more once all have joined. launcher: taken over; `close` closes
    it. Raises Internal when some have not joined, and what the launcher's `check` raises.
    """

    def __init__(
        self,
        tensor: int,
        threads: int,
        *,
        stages: int,
        machines: int,
        listen: Address,
        key: bytes,
        launcher: Launcher,
        spin: bool = False,
    ):
        self.tensor, self.stages = tensor, stages
        self._launcher = launcher
        self.far: list[MachineMemory] = []
        self._machine_watches: list[Link] = []
        self._links: dict[LinkName, Link] = {}
        self._processes: Processes | None = None
        group = GroupArguments(tensor, stages, machines, threads, spin)
        with socket.create_server(listen, family=_family(listen[0]), backlog=128) as listener:
            # What ranks exchange stays on the interface on which they found each other.
            host = listener.getsockname()[0]
            try:
                self._gather(listener, key, group, host)
            except LinkLost:
                self.close()
                raise Internal(f"not all of {machines} machines joined at {host}") from None
            except BaseException:
                self.close()
                raise

    @property
    def steps(self) -> Sequence[Link]:
        return self._of(LinkKind.STEPS)

    @property
    def copies(self) -> Sequence[Link]:
        return self._of(LinkKind.COPIES)

    @property
    def watched(self) -> Sequence[Link]:
        machines = self._of(LinkKind.MACHINE_WATCH)
        return [*self._of(LinkKind.WATCH), *machines, *self._launcher.watched]

    @property
    def pids(self) -> list[int]:
        """Of this machine's ranks."""
        return self._processes.pids if self._processes else []

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        if self._processes is not None:
            self._processes.close()
        self._launcher.close()

    def _of(self, kind: LinkKind) -> list[Link]:
        return [self._links[name] for name in sorted(self._links) if name.kind == kind]

    def _gather(
        self, listener: socket.socket, key: bytes, group: GroupArguments, host: str
    ) -> None:
        store = socket.create_server((host, 0), family=listener.family)
        with store:
            shape = _encode(Shape(group, store.getsockname()[1]))

            def joined(name: LinkName, connection: socket.socket) -> None:
                link = self._links[name] = Link(connection)
                if name.kind == LinkKind.MACHINE:
                    link.send(shape, STEP_S)
                    log.info("machine %d joined from %s", name.number, link.peer)

            others = range(1, group.machines)
            names = [name for machine in others for name in _names(group, machine)]
            leader = (host, listener.getsockname()[1])
            self._launcher.start(Order(leader, group.machines, group.ranks_of_a_machine))
            gather(listener, key, names, JOIN_S, joined, self._launcher.check)
            self.far = [
                MachineMemory(self._links[LinkName(LinkKind.MACHINE, m)], group.ranks_of(m))
                for m in others
            ]
            place = StoreArguments(store.fileno(), host, store.getsockname()[1], host)
            ends: list[list[socket.socket]] = []
            for rank in group.ranks_of(0):
                pairs = [socket.socketpair() for _ in RANK_KINDS]
                ends.append([theirs for _, theirs in pairs])
                for kind, (ours, _) in zip(RANK_KINDS, pairs, strict=True):
                    self._links[LinkName(kind, rank)] = Link(ours)
            self._processes = Processes(group, group.ranks_of(0), ends, place)


class Machine:
    """A machine that has joined a group as number `number`, from 1 on.

    Raises LinkLost when the worker does not listen at `leader`, or has another token, for JOIN_S.
    """

    def __init__(self, leader: Address, number: int, key: bytes):
        self._connect = partial(connect, leader, key)
        self._number = number
        self._memory = Link(self._connect(LinkName(LinkKind.MACHINE, number), JOIN_S))
        try:
            self._shape = _shape(self._memory.receive(STEP_S))
            self._watched = Link(self._connect(LinkName(LinkKind.MACHINE_WATCH, number), JOIN_S))
        except BaseException:
            self._memory.close()
            raise
        self.ranks = self._shape.group.ranks_of(number)
        """Which this machine has."""
        self.size = self._shape.group.tensor * self._shape.group.stages
        """Ranks of all machines."""

    def serve(self) -> None:
        """Runs this machine's ranks until the worker ends, or one of them does."""
        group, leader = self._shape.group, self._memory.peer
        place = StoreArguments(-1, leader, self._shape.store_port, self._memory.address)
        watch([self._watched], self._memory.cut)
        processes: Processes | None = None
        try:
            ends = [
                [self._connect(LinkName(kind, rank), JOIN_S) for kind in RANK_KINDS]
                for rank in self.ranks
            ]
            processes = Processes(group, self.ranks, ends, place)
            with suppress(LinkLost):
                self._hold_payloads()
        finally:
            self._memory.close()
            self._watched.close()
            if processes is not None:
                processes.close()

    def _hold_payloads(self) -> None:
        """Until the worker ends; raises LinkLost then."""
        scratch, room = Scratch(), memoryview(b"")
        try:
            while True:
                match _order.decode(self._memory.receive(None)):
                    case Put(total_bytes, offset, data):
                        if (
                            not 0
                            <= offset
                            <= offset + len(data)
                            <= total_bytes
                            <= MAX_MESSAGE_BYTES
                        ):
                            raise Internal("a payload does not fit its memory")
                        place, room = scratch.room(total_bytes)
                        room[offset : offset + len(data)] = data
                        self._memory.send(_encode(MemoryHeld(place)), STEP_S)
                    case Get(offset, size):
                        self._memory.send(bytes(room[offset : offset + size]), STEP_S)
        finally:
            room.release()
            scratch.close()


def _names(group: GroupArguments, machine: int) -> list[LinkName]:
    """Of a machine's links and its ranks'."""
    own = [LinkName(kind, machine) for kind in (LinkKind.MACHINE, LinkKind.MACHINE_WATCH)]
    return own + [LinkName(kind, rank) for rank in group.ranks_of(machine) for kind in RANK_KINDS]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
