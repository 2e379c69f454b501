"""A giving and a collecting worker in one process, joined by real gRPC on the loopback interface.

A dictionary of bytes per position stands for the engine; everything else is what production runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from batonlm.core.handover.table import LIMITS, State, StateLimit
from batonlm.core.request.attempt import ChoiceTokens, SequenceKey
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.scheduler.plan import KvPayload, StagingMemory
from batonlm.rpc.channels import INTERNAL_CLIENT
from batonlm.rpc.errors import ErrorInterceptor
from batonlm.rpc.server import INTERNAL_SERVER
from batonlm.transfer import nixl
from batonlm.transfer.peers import CollectStream, SenderConnection
from batonlm.transfer.receiver import Collected, KvReceiver, TransferRequest
from batonlm.transfer.sender import KvSender, PendingTransfer
from batonlm.transfer.staging import NO_FAULTS, Faults
from batonlm.transfer.stream import Liveness
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import Ucx
from batonlm.v1 import handover_pb2 as pb
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server

LAYOUT = KvLayout("ab" * 32, "float32", num_layers=2, num_kv_heads=2, key_size=8, value_size=8)
BUFFER_BYTES = 4096
POSITIONS_PER_BUFFER = 15
TOKENS = (ChoiceTokens(SequenceKey("request", 0, 1), 0, (17,)),)
FAST = Liveness(heartbeat_s=0.05, missed=20)


def kv_of(handover_id: bytes, position: int) -> bytes:
    """The KV bytes that stand for one position of one hand-over's input."""
    size = LAYOUT.bytes_per_position
    return hashlib.shake_128(handover_id + position.to_bytes(4, "little")).digest(size)


def expected(handover_id: bytes, num_positions: int, start: int = 0) -> dict[int, bytes]:
    return {p: kv_of(handover_id, p) for p in range(start, num_positions)}


class Pool:
    """Stands for an engine's blocks on the collecting side."""

    def __init__(self, cached: int | None = 0) -> None:
        """cached: positions that are there already; None: no room."""
        self.cached = cached
        self.kv: dict[int, bytes] = {}
        self.may_unpack = asyncio.Event()
        self.may_unpack.set()
        self.unpacking = 0

    async def reserve(self) -> int | None:
        return self.cached

    async def unpack(self, first_position: int, count: int, payload: Any) -> None:
        self.unpacking += 1
        try:
            await self.may_unpack.wait()
            size = LAYOUT.bytes_per_position
            # A tensor where the buffers stand for a device's.
            found = bytes(payload if isinstance(payload, memoryview) else payload.numpy())
            assert len(found) == count * size
            for i in range(count):
                self.kv[first_position + i] = found[i * size : (i + 1) * size]
        finally:
            self.unpacking -= 1


class Wire(SenderConnection):
    """The real connection, which can be cut, or silenced without either end noticing."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self._channel = channel
        self.silent = asyncio.Event()

    async def cut(self) -> None:
        await self._channel.close()

    def collect(self) -> CollectStream:
        return MutedStream(self._stub.Collect(), self.silent)


class MutedStream(CollectStream):
    """A stream that swallows everything once `silent` is set."""

    def __init__(self, call: Any, silent: asyncio.Event) -> None:
        super().__init__(call)
        self._silent = silent

    async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
        async for message in super().__aiter__():
            if not self._silent.is_set():
                yield message

    async def send(self, message: pb.CollectRequest) -> None:
        if not self._silent.is_set():
            await super().send(message)


class Rig:
    """Both workers. `offer` and `collect` are what prefill and decode do."""

    def __init__(
        self,
        sender: KvSender,
        receiver: KvReceiver,
        given: Staging,
        landed: Staging,
        me: WorkerIdentity,
        wires: list[Wire],
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.given, self.landed = given, landed
        self.collecting_as = me
        self._wires = wires
        self.may_pack = asyncio.Event()
        self.may_pack.set()

    def offer(
        self, num_positions: int, *, handover_id: bytes | None = None, deadline_s: float = 60.0
    ) -> PendingTransfer:
        handover_id = handover_id or secrets.token_bytes(16)

        async def pack(first_position: int, count: int, out: KvPayload) -> None:
            await self.may_pack.wait()
            positions = range(first_position, first_position + count)
            kv = b"".join(kv_of(handover_id, position) for position in positions)
            self.given.ring.memory.write(out, kv)

        return self.sender.offer(
            handover_id,
            self.collecting_as.instance_id,
            num_positions,
            pack,
            deadline_s=deadline_s,
        )

    def compute(self, offer: PendingTransfer) -> None:
        """What prefill reports when the whole input ran in one step."""
        offer.announce()
        offer.advance(offer.num_positions)
        offer.tokens(TOKENS)

    def ticket(self, offer: PendingTransfer, deadline_s: float = 60.0) -> TransferRequest:
        return TransferRequest(
            offer.handover_id, self.sender.identity, offer.num_positions, deadline_s
        )

    def ticket_for(self, handover_id: bytes, num_positions: int) -> TransferRequest:
        return TransferRequest(handover_id, self.sender.identity, num_positions)

    async def collect(self, offer: PendingTransfer, pool: Pool) -> Collected:
        return await self.receiver.collect(self.ticket(offer), pool.reserve, pool.unpack)

    async def cut(self) -> None:
        """Breaks all connections between the two."""
        for wire in self._wires:
            await wire.cut()

    def silence(self) -> None:
        """Nothing gets through any more, in either direction, and nobody is told."""
        for wire in self._wires:
            wire.silent.set()

    async def settle(self) -> None:
        """Waits until nothing of any hand-over is left, and fails when that does not happen."""
        await until(lambda: self.sender.num_offers == 0 and self.receiver.idle)
        await until(lambda: self.given.ring.num_free == self.given.ring.num_buffers)
        await until(lambda: self.landed.ring.num_free == self.landed.ring.num_buffers)


def device_memory(num_bytes: int) -> StagingMemory:
    """Ordinary memory that is treated as a device's. Skips the test where that cannot be."""
    if not nixl.available():
        pytest.skip("NIXL is not installed")
    pytest.importorskip("triton")
    import torch

    from batonlm.engine.kv.staging import DeviceStaging
    from tests.engine.devices import reason_against_interpreter

    if reason := reason_against_interpreter():
        pytest.skip(reason)
    return DeviceStaging(torch.device("cpu"), num_bytes)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come true, and fails when it does not."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  # what is watched knows nothing of events
            await asyncio.sleep(0.005)


def identity(role: str, address: str = "") -> WorkerIdentity:
    return WorkerIdentity(role, secrets.token_hex(16), address)


@asynccontextmanager
async def rig(
    transport: str = "loopback",
    *,
    num_buffers: int = 4,
    sender_layout: KvLayout = LAYOUT,
    sender_buffer_bytes: int = BUFFER_BYTES,
    receiver_buffer_bytes: int = BUFFER_BYTES,
    receiver_layout: KvLayout = LAYOUT,
    sender_memory: StagingMemory | None = None,
    receiver_memory: StagingMemory | None = None,
    sender_ucx: Ucx | None = None,
    receiver_ucx: Ucx | None = None,
    liveness: Liveness = FAST,
    limits: Mapping[State, StateLimit] = LIMITS,
    sender_faults: Faults = NO_FAULTS,
    receiver_faults: Faults = NO_FAULTS,
) -> AsyncIterator[Rig]:
    """Everything running; checked on leaving: all buffers free, no task left.

    transport: loopback, nixl, or device: nixl between memories that stand for those of devices.
    """
    if transport == "device":
        transport = "nixl"
        sender_memory = device_memory(num_buffers * sender_buffer_bytes)
        receiver_memory = device_memory(num_buffers * receiver_buffer_bytes)
    before = asyncio.all_tasks()
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=INTERNAL_SERVER)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    giving, collecting = identity("prefill", address), identity("decode")
    given = await Staging.open(
        giving.instance_id,
        transport=transport,
        num_buffers=num_buffers,
        buffer_bytes=sender_buffer_bytes,
        memory=sender_memory,
        ucx=sender_ucx,
        faults=sender_faults,
    )
    landed = await Staging.open(
        collecting.instance_id,
        transport=transport,
        num_buffers=num_buffers,
        buffer_bytes=receiver_buffer_bytes,
        memory=receiver_memory,
        ucx=receiver_ucx,
        faults=receiver_faults,
    )
    sender = KvSender(giving, sender_layout, given, liveness=liveness, limits=limits)
    add_HandoverServicer_to_server(sender, server)
    await server.start()
    wires: list[Wire] = []

    def connect(peer: WorkerIdentity) -> Wire:
        wires.append(Wire(grpc.aio.insecure_channel(peer.address, options=INTERNAL_CLIENT)))
        return wires[-1]

    receiver = KvReceiver(
        collecting, receiver_layout, landed, connect, liveness=liveness, limits=limits
    )
    world = Rig(sender, receiver, given, landed, collecting, wires)
    try:
        yield world
        await world.settle()
    finally:
        await receiver.close()
        await sender.close()
        for wire in wires:
            await wire.cut()
        await server.stop(None)
        await landed.close()
        await given.close()
    async with asyncio.timeout(120):
        while left := {t for t in asyncio.all_tasks() - before if not t.done()}:
            await asyncio.wait(left, timeout=0.1)
