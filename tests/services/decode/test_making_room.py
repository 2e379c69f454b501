"""Beginner: a reservation that pushes others out waits for the steps in flight, not for ever."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

from batonlm.core.errors import Overloaded
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.decode.service import DecodeService
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.testing.fake_runner import FakeRunner
from batonlm.transfer.kv_chunk import Unpack
from batonlm.transfer.receiver import Collected, KvReceiver, Reserve, TransferRequest
from batonlm.transfer.sender import KvSender
from tests.services.worker.pair import PATIENCE_S

NUM_BLOCKS, BLOCK_SIZE = 16, 4
SENDER = WorkerIdentity("prefill", "0" * 32, "127.0.0.1:1")


class ReservingReceiver(KvReceiver):
    """Stops where KV would travel; all before that is real."""

    def __init__(self) -> None:
        self.reserved: list[int | None] = []

    async def collect(self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack) -> Collected:
        self.reserved.append(await reserve())
        raise Overloaded("nothing travels here", retry_after_s=1.0)

    async def close(self) -> None:
        pass


def attempt(name: str, seed: int, *, priority: int) -> Attempt:
    """Two of them fill the pool."""
    prompt = tuple(10 + (seed * 31 + i * 7) % 500 for i in range(22))
    stop = StopParams(38, ignore_eos=True)
    sampling = SamplingParams(temperature=0.0)
    return Attempt(name, 0, (0,), prompt, len(prompt), sampling, stop, priority=priority)


def make_loop() -> EngineLoop:
    runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, step_seconds=0.005, depth=2, delay_steps=1)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    policy = SchedulerPolicy(headroom=4)
    return EngineLoop(runner, Scheduler(pool, policy, runner.model))


def add(one: Attempt, stay: bool, loop: EngineLoop) -> None:
    loop.scheduler.add(one, 0.0, max_unconfirmed=2 if stay else 0)


def num_running(loop: EngineLoop) -> int:
    return loop.scheduler.load.running_sequences


async def reserved_beside(*others: Attempt, wanted: Attempt, stay: bool) -> int | None:
    """What a reservation is answered on an engine that two others fill. stay: they never end."""

    def deliver(events: list[Event]) -> None:
        pass

    engine = EngineThread(make_loop, deliver)
    await engine.start()
    receiver = ReservingReceiver()
    sender: Any = AsyncMock(spec=KvSender)
    service = DecodeService(
        engine, sender, receiver, GrammarBook(None), handover_timeout_s=30.0, resume_window_s=30.0
    )
    session = service.session("r")
    try:
        for one in others:
            await engine.call(partial(add, one, stay))
        while stay and await engine.call(num_running) < 2:
            pass
        service.start(session, wanted, TransferRequest(b"h", SENDER, 22), 0)
        async with asyncio.timeout(PATIENCE_S):
            frame = None
            while frame is None:
                frame = await session.next_frame(session.stream or session.attach(), PATIENCE_S)
        assert [failure.request_id for failure in frame.failures] == [wanted.request_id]
        return receiver.reserved[0]
    finally:
        await service.close()
        await engine.stop()


async def test_it_gets_the_room_that_less_important_ones_give() -> None:
    lesser = [attempt(f"l{i}", i, priority=1) for i in range(2)]
    assert await reserved_beside(*lesser, wanted=attempt("urgent", 7, priority=0), stay=False) == 0


async def test_it_does_not_wait_for_room_that_nobody_gives() -> None:
    equal = [attempt(f"e{i}", i, priority=0) for i in range(4)]
    assert await reserved_beside(*equal, wanted=attempt("late", 7, priority=0), stay=True) is None
