"""A prefill and a decode worker in one process, each behind a real gRPC server, with real engine
threads and real KV transport; only the model is replaced, by the runner whose tokens show wrong KV.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from batonlm.cli.ports import free_ports
from batonlm.core.handover.table import LIMITS, State, StateLimit
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.events import Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.decode.service import DecodeService
from batonlm.decode.servicer import DecodeServicer
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.prefill.service import PrefillService, PrefillServicer
from batonlm.rpc.channels import Channels
from batonlm.rpc.convert import attempt_to_proto
from batonlm.rpc.server import ProcessServer, Service
from batonlm.rpc.tracing import OFF, Tracer
from batonlm.testing.fake_runner import FakeRunner
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import KvReceiver
from batonlm.transfer.sender import KvSender
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.transports import Staging
from batonlm.v1 import decode_pb2_grpc, handover_pb2_grpc, prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:
    from batonlm.v1.decode_pb2_grpc import DecodeAsyncStub
    from batonlm.v1.prefill_pb2_grpc import PrefillAsyncStub

PATIENCE_S = 120.0
BUFFER_BYTES = 4096
"""Holds about 240 positions of the fake runner, so that prompts take several KV chunks."""

NUM_BLOCKS = 128
CHUNK = 128
EOS = 3
POISON = 7


class GatedRunner(FakeRunner):
    """Can be held before a step: `allow` lets that many steps through, `open` all."""

    def __init__(
        self, block_size: int, num_blocks: int = NUM_BLOCKS, state_positions: int = 0
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            eos_token_ids=(EOS,),
            poison_token_id=POISON,
            state_positions=state_positions,
        )
        self._steps = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()
        self.num_begun = 0
        self.num_done = 0

    def hold(self) -> None:
        self._open.clear()

    def allow(self, steps: int) -> None:
        self._steps.release(steps)

    def open(self) -> None:
        self._open.set()
        self._steps.release(1000)

    def submit(self, plan: StepPlan) -> None:
        self.num_begun += 1
        if not self._open.is_set():
            assert self._steps.acquire(timeout=PATIENCE_S)
        super().submit(plan)
        self.num_done += 1


@dataclass
class Worker:
    """What both workers have. pool and runner belong to the engine's thread."""

    identity: WorkerIdentity
    runner: GatedRunner
    pool: BlockPool
    engine: EngineThread
    staging: Staging
    stats: HandoverStats
    server: ProcessServer
    channel: grpc.aio.Channel

    async def is_idle(self) -> bool:
        """Nothing is left of any attempt: no block, no table, no buffer."""

        def look(loop: EngineLoop) -> bool:
            loop.scheduler.check()
            all_free = self.pool.num_free == self.pool.num_blocks
            return all_free and not self.pool.num_tables and not loop.scheduler.has_work

        ring = self.staging.ring
        return ring.num_free == ring.num_buffers and await self.engine.call(look)


@dataclass
class Pair:
    """Both workers, their services, and Prefill's stub. `decode_stub` opens sessions."""

    prefill: Worker
    decode: Worker
    prefilling: PrefillService
    decoding: DecodeService
    sender: KvSender
    departing: KvSender
    receiver: KvReceiver
    prefill_stub: PrefillAsyncStub
    decode_stub: DecodeAsyncStub

    def run(self, attempt: Attempt, handover_id: bytes = b"") -> Any:
        """Prefill.Run as a call that can be awaited or cancelled."""
        return self.prefill_stub.Run(
            prefill_pb2.RunRequest(
                attempt=attempt_to_proto(attempt),
                handover_id=handover_id,
                decode_instance_id=self.decode.identity.instance_id if handover_id else "",
                prefill_instance_id=self.prefill.identity.instance_id,
            )
        )

    async def cancel_prefill(self, attempt: Attempt) -> None:
        await self.prefill_stub.Cancel(
            prefill_pb2.CancelRequest(request_id=attempt.request_id, attempt=attempt.attempt)
        )

    async def settle(self) -> None:
        """Waits until nothing of any attempt is left on either worker, and fails when it stays."""
        for worker in (self.prefill, self.decode):
            worker.runner.open()
        async with asyncio.timeout(PATIENCE_S):
            while not await self._is_idle():  # noqa: ASYNC110  # nobody tells of idleness
                await asyncio.sleep(0.01)

    async def _is_idle(self) -> bool:
        return (
            self.prefilling.num_attempts == self.decoding.num_attempts == 0
            and self.sender.num_offers == self.departing.num_offers == 0
            and self.receiver.idle
            and not any((*self.prefilling.holdings.values(), *self.decoding.holdings.values()))
            and await self.prefill.is_idle()
            and await self.decode.is_idle()
        )


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come true, and fails when it does not."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is watched knows nothing of events
            await asyncio.sleep(0.005)


def attempt(
    request_id: str = "r",
    *,
    size: int = 600,
    n: int = 1,
    max_tokens: int = 12,
    seed: int = 1,
    number: int = 0,
    greedy: bool = False,
    accepted: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    remaining_s: float | None = None,
    last_token: int | None = None,
) -> Attempt:
    """Prompts of one seed are prefixes of one another."""
    prompt = tuple(10 + (seed * 131 + i * 7) % 2000 for i in range(size))
    if last_token is not None:
        prompt = (*prompt[:-1], last_token)
    return Attempt(
        request_id,
        number,
        tuple(range(n)),
        prompt + accepted,
        size,
        SamplingParams(temperature=0.0 if greedy else 1.0, seed=seed),
        StopParams(max_tokens, stop_token_ids=stop_token_ids),
        remaining_s=remaining_s,
    )


def reference(attempt: Attempt, state_positions: int = 0) -> dict[int, list[int]]:
    """Each choice's tokens from one undisturbed engine, all by itself."""
    runner = FakeRunner(512, 8, eos_token_ids=(EOS,), state_positions=state_positions)
    pool = BlockPool(512, 8, state_positions=state_positions)
    loop = EngineLoop(runner, Scheduler(pool, SchedulerPolicy(), runner.model))
    loop.scheduler.add(attempt, 0.0)
    made: dict[int, list[int]] = {choice: [] for choice in attempt.choices}
    while loop.scheduler.has_work:
        for event in loop.step(0.0):
            if isinstance(event, NewTokens):
                for tokens in event.tokens:
                    made[tokens.key.choice] += tokens.token_ids
    return made


def keys_of(attempt: Attempt) -> list[SequenceKey]:
    return list(attempt.keys())


def new_id() -> bytes:
    return secrets.token_bytes(16)


@asynccontextmanager
async def pair(
    transport: str = "loopback",
    *,
    block_sizes: tuple[int, int] = (16, 16),
    resume_window_s: float = 30.0,
    orphan_s: float = 30.0,
    handover_timeout_s: float = 60.0,
    max_sequences: int = 64,
    num_blocks: int = NUM_BLOCKS,
    state_positions: int = 0,
    limits: Mapping[State, StateLimit] = LIMITS,
    tracer: Tracer = OFF,
) -> AsyncIterator[Pair]:
    """Everything running; checked on leaving: nothing held, no task left.

    limits: of what either gives away.
    """
    before = asyncio.all_tasks()
    async with AsyncExitStack() as ends:
        prefill_runner, decode_runner = (
            GatedRunner(size, num_blocks, state_positions) for size in block_sizes
        )

        def prefill_scheduler(pool: BlockPool) -> Scheduler:
            policy = replace(PREFILL, token_budget=CHUNK, batch_window_s=0.0)
            return Scheduler(pool, policy, prefill_runner.model)

        def decode_scheduler(pool: BlockPool) -> Scheduler:
            policy = SchedulerPolicy(
                max_sequences=max_sequences,
                token_budget=max_sequences + CHUNK,
                prefill_budget=CHUNK,
            )
            return Scheduler(pool, policy, decode_runner.model)

        channels = Channels()
        ends.push_async_callback(channels.close)
        services: dict[str, PrefillService | DecodeService] = {}

        def deliver_to(role: str) -> Callable[[list[Event]], None]:
            return lambda events: services[role].deliver(events)

        prefill_parts = await _parts(
            ends, "prefill", prefill_runner, prefill_scheduler, deliver_to("prefill"), transport
        )
        decode_parts = await _parts(
            ends, "decode", decode_runner, decode_scheduler, deliver_to("decode"), transport
        )
        pool, engine, staging, identity = prefill_parts
        given, taken = HandoverStats(), HandoverStats()
        sender = KvSender(identity, prefill_runner.layout, staging, stats=given, limits=limits)
        prefilling = PrefillService(
            engine,
            sender,
            KvReceiver(
                identity,
                prefill_runner.layout,
                staging,
                lambda peer: SenderConnection(channels.get(peer.address)),
            ),
            GrammarBook(None),
            handover_timeout_s=handover_timeout_s,
            tracer=tracer,
        )
        services["prefill"] = prefilling
        ends.push_async_callback(prefilling.close)
        servicer = PrefillServicer(prefilling, identity.instance_id)
        server, channel = await _serve(
            ends,
            identity,
            lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, s),
            lambda s: handover_pb2_grpc.add_HandoverServicer_to_server(sender, s),
        )
        prefill = Worker(identity, prefill_runner, pool, engine, staging, given, server, channel)

        pool, engine, staging, identity = decode_parts
        receiver = KvReceiver(
            identity,
            decode_runner.layout,
            staging,
            lambda peer: SenderConnection(channels.get(peer.address)),
            stats=taken,
        )
        departing = KvSender(identity, decode_runner.layout, staging, limits=limits)
        decoding = DecodeService(
            engine,
            departing,
            receiver,
            GrammarBook(None),
            handover_timeout_s=handover_timeout_s,
            resume_window_s=resume_window_s,
            orphan_s=orphan_s,
            tracer=tracer,
        )
        services["decode"] = decoding
        ends.push_async_callback(decoding.close)
        sessions = DecodeServicer(decoding, engine, identity)
        server, channel = await _serve(
            ends,
            identity,
            lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(sessions, s),
            lambda s: handover_pb2_grpc.add_HandoverServicer_to_server(departing, s),
        )
        decode = Worker(identity, decode_runner, pool, engine, staging, taken, server, channel)
        world = Pair(
            prefill,
            decode,
            prefilling,
            decoding,
            sender,
            departing,
            receiver,
            prefill_pb2_grpc.PrefillStub(prefill.channel),
            decode_pb2_grpc.DecodeStub(decode.channel),
        )
        try:
            yield world
            await world.settle()
        finally:
            prefill_runner.open()
            decode_runner.open()
    async with asyncio.timeout(PATIENCE_S):
        while left := {task for task in asyncio.all_tasks() - before if not task.done()}:
            await asyncio.wait(left, timeout=0.1)


async def _parts(
    ends: AsyncExitStack,
    role: str,
    runner: GatedRunner,
    make_scheduler: Callable[[BlockPool], Any],
    deliver: Callable[[list[Event]], None],
    transport: str,
) -> tuple[BlockPool, EngineThread, Staging, WorkerIdentity]:
    state_positions = runner.layout.state_positions
    pool = BlockPool(runner.num_blocks, runner.block_size, state_positions=state_positions)
    engine: EngineThread = EngineThread(lambda: EngineLoop(runner, make_scheduler(pool)), deliver)
    await engine.start()
    ends.push_async_callback(engine.stop)
    identity = WorkerIdentity(role, secrets.token_hex(16), _free_address())
    staging = await Staging.open(
        identity.instance_id, transport=transport, num_buffers=8, buffer_bytes=BUFFER_BYTES
    )
    ends.push_async_callback(staging.close)
    return pool, engine, staging, identity


async def _serve(
    ends: AsyncExitStack, identity: WorkerIdentity, *register: Callable[[Any], None]
) -> tuple[ProcessServer, grpc.aio.Channel]:
    services = [Service(f"test.{i}", function) for i, function in enumerate(register)]
    server = ProcessServer(listen=identity.address, services=services, reflection=False)
    await server.start()
    # No call is of interest any more, so none gets time to end.
    ends.push_async_callback(server.stop, 0.0)
    channel = grpc.aio.insecure_channel(identity.address)
    ends.push_async_callback(channel.close)
    return server, channel


def _free_address() -> str:
    """Of a port that the system gives to nobody before the server listens."""
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"
