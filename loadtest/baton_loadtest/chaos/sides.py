"""One side of a hand-over in its own process: the transfer code of a worker, without a model.

A guarded staging pool detects wrong writes; a pattern stands for an engine's KV. The experiment
commands this process by JSON lines on stdin. Every line has a number `n`, which its answer repeats.
Arguments: ROLE (sender or receiver) and SETTINGS as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np

from batonlm.core.errors import BatonError
from batonlm.core.request.attempt import ChoiceTokens, SequenceKey
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.scheduler.plan import KvPayload, StagingMemory
from batonlm.rpc.channels import Channels, bind
from batonlm.rpc.errors import ErrorInterceptor
from batonlm.rpc.lifecycle import die_with_parent, new_instance_id
from batonlm.rpc.server import INTERNAL_SERVER
from batonlm.testing.faults import FaultInjector, parse
from batonlm.transfer.loopback import LoopbackTransport
from batonlm.transfer.nixl import NixlTransport
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import KvReceiver, TransferRequest
from batonlm.transfer.sender import KvSender, PendingTransfer
from batonlm.transfer.staging import HostMemory, KvTransport, StagingBuffer, StagingPool
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.stream import Liveness
from batonlm.transfer.transports import Staging, TransferReader
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, inherited
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of both processes."""

    transport: str = "nixl"
    memory: str = "host"
    """That buffers lie in: the host's, or a device's, for which ordinary memory stands."""
    num_buffers: int = 8
    buffer_bytes: int = 4096
    layers: int = 2
    """128 bytes per position each."""
    positions: int = 90
    """Of the longest input."""
    state_positions: int = 0
    """Those of a state, behind the input's."""
    chunk: int = 30
    """Positions computed at a time."""
    heartbeat_s: float = 0.1
    """See `batonlm.transfer.stream.Liveness`."""
    missed: int = 10
    """See `batonlm.transfer.stream.Liveness`."""
    faults: str = ""

    @property
    def patient(self) -> Settings:
        """The same for experiments in which neither process stops: one that only waits for a core
        must not count as silent."""
        return replace(self, missed=20 * self.missed)

    @property
    def moved(self) -> int:
        """Positions that a hand-over moves."""
        return self.positions + self.state_positions


CANARY = 0xEE
HEADS, HEAD_SIZE = 2, 8


def layout(layers: int, state_positions: int = 0) -> KvLayout:
    """Returns a layout with 128 bytes per position and layer."""
    return KvLayout("ab" * 32, "float32", layers, HEADS, HEAD_SIZE, HEAD_SIZE, state_positions)


def kv_of(handover_id: bytes, position: int, size: int) -> bytes:
    """Returns the KV of one position of one hand-over: a hash of the hand-over's id and the
    position, so that bytes of another hand-over, position or time never match by chance."""
    return hashlib.shake_128(handover_id + position.to_bytes(4, "little")).digest(size)


class Pool:
    """Stands for an engine's blocks: room for one input, and as much guard memory around it."""

    def __init__(self, positions: int, bytes_per_position: int) -> None:
        self._size, self._margin = bytes_per_position, positions * bytes_per_position
        self._clean = bytes([CANARY]) * (3 * self._margin)
        self.memory = bytearray(self._clean)
        """The room between its two guards."""
        self._unpacked: set[int] = set()

    async def unpack(self, first_position: int, count: int, payload: bytes | memoryview) -> None:
        start = self._margin + first_position * self._size
        self.memory[start : start + count * self._size] = payload
        self._unpacked.update(range(first_position, first_position + count))

    @property
    def num_unpacked(self) -> int:
        return len(self._unpacked)

    def num_wrong(self, handover_id: bytes) -> int:
        """Returns the number of unpacked positions with wrong contents."""
        return sum(
            self._at(position) != kv_of(handover_id, position, self._size)
            for position in self._unpacked
        )

    def num_changed(self) -> int:
        """Returns the number of bytes that changed without being unpacked."""
        left = bytearray(self.memory)
        for position in self._unpacked:
            start = self._margin + position * self._size
            left[start : start + self._size] = self._clean[: self._size]
        return differing(left, self._clean)

    def contents(self) -> bytes:
        """Returns the current contents."""
        return bytes(self.memory)

    def clear(self) -> None:
        """Must not be called while data is unpacked."""
        self.memory[:] = self._clean
        self._unpacked.clear()

    def _at(self, position: int) -> bytes:
        start = self._margin + position * self._size
        return bytes(self.memory[start : start + self._size])


def differing(one: bytes | bytearray | memoryview, other: bytes | bytearray | memoryview) -> int:
    """Returns how many bytes differ."""
    return int(np.count_nonzero(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)))


TRIES = 32


class WatchedRing(StagingPool):
    """A pool that records which buffers were ever taken."""

    taken: set[int]

    def __init__(self, num_buffers: int, buffer_bytes: int, memory: StagingMemory) -> None:
        self.taken = set()
        super().__init__(num_buffers, buffer_bytes, memory)

    def take(self, peer: str, *, landing: bool = False) -> StagingBuffer | None:
        buffer = super().take(peer, landing=landing)
        if buffer is not None:
            self.taken.add(buffer.index)
        return buffer


class Guarded:
    """A pool between two guards of the same size, which detect wrong writes.

    above, below: the guards. adjacent: how many guards are directly next to the pool. The system
    maps memory of equal size one below the other unless a gap fits; so gaps are filled until it
    does.
    """

    def __init__(
        self, num_buffers: int, buffer_bytes: int, make: Callable[[int], StagingMemory]
    ) -> None:
        """make: memory of so many bytes."""
        size = num_buffers * buffer_bytes
        self._canary = bytes([CANARY]) * size
        self._buffer_canary = bytes([CANARY]) * buffer_bytes
        self._before: dict[int, bytes] = {}
        fillers = []
        for _ in range(TRIES):
            self.above = mmap.mmap(-1, size)
            self.ring = WatchedRing(num_buffers, buffer_bytes, make(size))
            self.below = mmap.mmap(-1, size)
            self.adjacent = sum(
                _address(guard) - self.ring.memory.regions[0].address == distance
                for guard, distance in zip(self._guards, (size, -size), strict=True)
            )
            if self.adjacent == 2:
                break
            fillers.append((self.above, self.ring, self.below))
        for _, ring, _ in fillers:
            ring.close()
        for guard in self._guards:
            guard[:] = self._canary

    @property
    def _guards(self) -> tuple[mmap.mmap, mmap.mmap]:
        return self.above, self.below

    def clear(self) -> None:
        """Fills all buffers with a pattern. All of them must be free."""
        for index in range(self.ring.num_buffers):
            self.ring.memory.write(self.ring.view(index), self._buffer_canary)
        self.ring.taken.clear()

    def num_changed(self) -> int:
        """Returns the bytes that changed since `clear` in the guards and in buffers that were not
        taken."""
        changed = sum(differing(guard[:], self._canary) for guard in self._guards)
        for index in set(range(self.ring.num_buffers)) - self.ring.taken:
            changed += differing(self._contents(index), self._buffer_canary)
        return changed

    def snapshot(self) -> None:
        """Stores the contents of every buffer."""
        self._before = {i: self._contents(i) for i in range(self.ring.num_buffers)}

    def num_late(self) -> int:
        """Returns the bytes in buffers that changed since `snapshot`."""
        return sum(differing(self._contents(i), old) for i, old in self._before.items())

    def _contents(self, index: int) -> bytes:
        return self.ring.memory.read(self.ring.view(index))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def device_memory(num_bytes: int) -> StagingMemory:
    """Returns memory of the host that is treated as a device's."""
    import torch

    from batonlm.engine.kv.staging import DeviceStaging

    return DeviceStaging(torch.device("cpu"), num_bytes)


Values = dict[str, Any]
Do = Callable[[Values], Awaitable[Values]]


class Side(ABC):
    """Common to both sides: a guarded pool, a transport, faults, and the commands arm, reset,
    state, snapshot, late."""

    def __init__(self, role: str, settings: Settings) -> None:
        self.settings = settings
        self.layout = layout(settings.layers, settings.state_positions)
        self.faults = FaultInjector(parse(settings.faults))
        make = device_memory if settings.memory == "device" else HostMemory
        self.guarded = Guarded(settings.num_buffers, settings.buffer_bytes, make)
        self.ring = self.guarded.ring
        self.stats = HandoverStats()
        self.liveness = Liveness(settings.heartbeat_s, settings.missed)
        self.me = WorkerIdentity(role, new_instance_id(), "")

    async def open(self) -> None:
        # The processes trust each other on whatever path they use.
        tls = inherited()
        ucx = choose(KvNetwork.TRUSTED if tls else KvNetwork.LOCAL, inherited=tls)
        reader = TransferReader(lambda: self.faults.transport(self._transport(ucx)))
        await reader.start()
        self.staging = Staging(
            self.ring, {self.settings.transport: reader}, ucx, faults=self.faults
        )

    async def do(self, command: Values) -> Values:
        """Executes a command. Raises BatonError, and KeyError for an unknown one."""
        known: dict[str, Do] = {
            "arm": self.arm,
            "reset": self.reset,
            "state": self.state,
            "snapshot": self.snapshot,
            "late": self.late,
            **self.commands(),
        }
        return await known[command["do"]](command)

    @abstractmethod
    def commands(self) -> dict[str, Do]:
        """The additional commands of this side."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no hand-over is in progress and nothing of one remains."""

    async def arm(self, command: Values) -> Values:
        self.faults.arm(parse(command["faults"]))
        return {}

    async def reset(self, command: Values) -> Values:
        self.guarded.clear()
        return {}

    async def snapshot(self, command: Values) -> Values:
        self.guarded.snapshot()
        return {}

    async def late(self, command: Values) -> Values:
        return {"bytes": self.guarded.num_late()}

    async def state(self, command: Values) -> Values:
        return {
            "idle": self.is_idle(),
            "free": self.ring.num_free,
            "buffers": self.ring.num_buffers,
            "orphaned": self.ring.num_orphaned,
            "injected": self.faults.injected.total(),
            "mismatches": dict(self.stats.mismatches),
            "changed": self.guarded.num_changed() if command.get("look") else 0,
            "guards": self.guarded.adjacent,
        }

    def _transport(self, ucx: Ucx) -> KvTransport:
        if self.settings.transport == "loopback":
            return LoopbackTransport(self.ring)
        return NixlTransport(self.ring, self.me.instance_id, ucx)


TOKENS = (ChoiceTokens(SequenceKey("request", 0, 1), 0, (17,)),)
MAX_OFFERS = 64


class GivingSide(Side):
    """The sender's side, with the additional commands offer and outcome. A pattern stands for what
    an engine computes; everything else is the code of a worker."""

    async def open(self) -> None:
        await super().open()
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=INTERNAL_SERVER)
        address = f"127.0.0.1:{bind(self.server, '127.0.0.1:0')}"
        self.me = WorkerIdentity(self.me.role, self.me.instance_id, address)
        self.sender = KvSender(
            self.me, self.layout, self.staging, liveness=self.liveness, stats=self.stats
        )
        add_HandoverServicer_to_server(self.sender, self.server)
        await self.server.start()
        self._offers: OrderedDict[str, PendingTransfer] = OrderedDict()
        self._computing: set[asyncio.Task[None]] = set()

    def commands(self) -> dict[str, Do]:
        return {"offer": self.offer, "outcome": self.outcome}

    def is_idle(self) -> bool:
        return self.sender.num_offers == self.sender.num_early_streams == 0 and not self._computing

    async def offer(self, command: Values) -> Values:
        if "faults" in command:
            await self.arm(command)
        handover_id, size = bytes.fromhex(command["id"]), self.layout.bytes_per_position

        async def pack(first_position: int, count: int, out: KvPayload) -> None:
            kv = b"".join(kv_of(handover_id, first_position + i, size) for i in range(count))
            self.ring.memory.write(out, kv)

        offer = self.sender.offer(
            handover_id,
            command["receiver"],
            command["positions"],
            pack,
            deadline_s=command["deadline_s"],
        )
        self._offers[command["id"]] = offer
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        task = asyncio.create_task(self._compute(offer))
        self._computing.add(task)
        task.add_done_callback(self._computing.discard)
        return {"injected": self.faults.injected.total()}

    async def outcome(self, command: Values) -> Values:
        """Answers when the hand-over has ended."""
        ended = await self._offers.pop(command["id"]).wait()
        return {
            "outcome": ended.label,
            "error": type(ended.error).__name__ if ended.error else "",
        }

    async def _compute(self, offer: PendingTransfer) -> None:
        offer.announce()
        for finished in range(0, offer.num_positions, self.settings.chunk):
            offer.advance(min(finished + self.settings.chunk, offer.num_positions))
            await asyncio.sleep(0)
        offer.tokens(TOKENS)


class CollectingSide(Side):
    """The receiver's side, with the additional command collect. A byte pool stands for an engine's
    blocks; everything else is the code of a worker."""

    async def open(self) -> None:
        await super().open()
        self.channels = Channels()
        self.receiver = KvReceiver(
            self.me,
            self.layout,
            self.staging,
            lambda sender: SenderConnection(self.channels.get(sender.address)),
            liveness=self.liveness,
            stats=self.stats,
        )
        self.pool = Pool(self.settings.moved, self.layout.bytes_per_position)
        self._blocks = b""

    def commands(self) -> dict[str, Do]:
        return {"collect": self.collect}

    def is_idle(self) -> bool:
        return self.receiver.idle

    async def snapshot(self, command: Values) -> Values:
        self._blocks = self.pool.contents()
        return await super().snapshot(command)

    async def late(self, command: Values) -> Values:
        blocks = differing(self.pool.contents(), self._blocks)
        return {**await super().late(command), "blocks": blocks}

    async def collect(self, command: Values) -> Values:
        """full: there is no room. Failures are reported in the answer, not raised."""
        if "faults" in command:
            await self.arm(command)
        handover_id = bytes.fromhex(command["id"])
        sender = WorkerIdentity("prefill", command["instance_id"], command["address"])
        ticket = TransferRequest(handover_id, sender, command["positions"], command["deadline_s"])

        async def reserve() -> int | None:
            return None if command.get("full") else 0

        async def unpack(first_position: int, count: int, payload: KvPayload) -> None:
            await self.pool.unpack(first_position, count, self.ring.memory.read(payload))

        self.pool.clear()
        clock = asyncio.get_running_loop().time
        began, outcome, message = clock(), "completed", ""
        try:
            await self.receiver.collect(ticket, reserve, unpack)
        except BatonError as error:
            outcome, message = type(error).__name__, error.message
        return {
            "outcome": outcome,
            "message": message,
            "seconds": clock() - began,
            "unpacked": self.pool.num_unpacked,
            "wrong": self.pool.num_wrong(handover_id),
            "changed": self.pool.num_changed(),
            "injected": self.faults.injected.total(),
            "mismatches": self.stats.mismatches.total(),
        }


async def serve(role: str, settings: Settings) -> None:
    """Answers commands until standard input ends."""
    made = GivingSide if role == "sender" else CollectingSide
    side: Side = made(role, settings)
    await side.open()
    say(n=0, instance_id=side.me.instance_id, address=side.me.address)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    tasks: set[asyncio.Task[None]] = set()

    async def answer(command: Values) -> None:
        try:
            answer = await side.do(command)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        say(n=command["n"], **answer)

    while line := await lines.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(sys.argv[1], Settings(**json.loads(sys.argv[2]))))
    # Everything that remains belongs to an experiment that has ended.
    os._exit(0)
