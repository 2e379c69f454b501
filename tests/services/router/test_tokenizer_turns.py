"""What waits for tokenizers: in whose turn it goes, how much is sent, and that nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Unavailable
from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.routing.failures import Breaker, RetryBudget
from batonlm.core.routing.load import WorkerDescription
from batonlm.router.config import RouterConfig
from batonlm.router.workers.clients import TokenizerClient
from batonlm.router.workers.fleet import Pool, Worker
from batonlm.router.workers.shared_stream import Broadcast
from batonlm.router.workers.work_queue import (
    LONG_BYTES,
    MAX_GRAMMARS,
    SHORT_BYTES_PER_THREAD,
    SHORT_INPUTS_PER_THREAD,
    Lane,
    QueuedWork,
    WorkerSlot,
    WorkQueue,
)
from tests.services.router.conftest import until

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", weight=3.0)
LONG_AGO, NEVER = 0.0, 1e9


def worker(name: str = "t0", *, threads: int = 2, digest: str = "d") -> Worker[TokenizerClient]:
    model = ModelDescription("m", "", 0, 10, (), digest)
    described = WorkerDescription(WorkerIdentity("tokenizer", name, ""), model)
    described = WorkerDescription(described.identity, model, max_sequences=threads)
    return Worker(described, cast(TokenizerClient, None), cast(Any, None), Breaker())


class Usable:
    """A pool of workers that are all usable."""

    awaited = True

    def absent(self) -> Unavailable:
        return Unavailable("No tokenizer worker is ready.")

    def __init__(self, *workers: Worker[TokenizerClient]) -> None:
        self.workers = [*workers]

    def usable(self, now: float) -> list[Worker[TokenizerClient]]:
        return self.workers


class World:
    """What the tests ask of the turns, and the turns that were had, in order."""

    def __init__(self) -> None:
        self.pool = Usable(worker())
        self.changed = Broadcast()
        self.turns = WorkQueue(
            cast(Pool[TokenizerClient], self.pool),
            self.changed,
            RouterConfig(),
            RetryBudget(share=0.1, per_s=1.0, most=1),
            fits=Worker.has_tokenizer,
        )
        self.had: list[tuple[str, WorkerSlot[TokenizerClient]]] = []

    def ask(
        self,
        tenant: Tenant = A,
        size: int = LONG_BYTES,
        lane: Lane = Lane.LONG,
        *,
        deadline: float = NEVER,
        **more: Any,
    ) -> asyncio.Task[WorkerSlot[TokenizerClient]]:
        async def one() -> WorkerSlot[TokenizerClient]:
            fields: dict[str, Any] = {
                "digest": "d", "passed_over": (), "give_up": NEVER, **more
            }  # fmt: skip
            wanted = QueuedWork[TokenizerClient]("r", tenant, lane, size, **fields)
            turn = await self.turns.turn(wanted, deadline)
            self.had.append((tenant.name, turn))
            return turn

        return asyncio.create_task(one())

    async def serve_all(self) -> str:
        """Ends turns in the order in which they were had; returns whose they were."""
        served = 0
        await settled()
        while served < len(self.had):
            self.had[served][1].release()
            served += 1
            await settled()
        return "".join(name[0] for name, _ in self.had)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.turns.close()
    assert made.turns.num_waiting == made.turns.num_sent == 0
    assert all(one.placed_sequences == 0 for one in made.pool.workers)


async def test_tenants_take_turns_whoever_has_more_waiting(world: World) -> None:
    for _ in range(6):
        world.ask(A)
    await settled()
    assert world.turns.num_sent == 1, "a thread is kept for short ones"
    for _ in range(2):
        world.ask(B)
    await settled()
    assert await world.serve_all() == "a" + "ababaaa"


async def test_turns_are_by_bytes_and_weights(world: World) -> None:
    world.pool.workers = [worker(threads=1)]
    first = world.ask(Tenant("first"))
    await settled()
    for _ in range(30):
        world.ask(A, 4 * LONG_BYTES)
        world.ask(B)
        world.ask(HEAVY, 4 * LONG_BYTES)
    (await first).release()
    await settled()
    order = await world.serve_all()
    begun = order[1:31]
    sizes = {name: begun.count(name) * size for name, size in (("a", 4), ("b", 1), ("h", 4))}
    # As near as the largest inputs of both let them be.
    assert abs(sizes["a"] - sizes["b"]) <= 4 + 4
    assert abs(sizes["h"] - 3 * sizes["a"]) <= 3 * (4 + 4)


async def test_kinds_of_input_do_not_wait_for_one_another(world: World) -> None:
    for lane in (Lane.LONG, Lane.GRAMMAR):
        for _ in range(5):
            world.ask(A, lane=lane)
    await settled()
    assert world.turns.num_sent == 1 + MAX_GRAMMARS
    short = world.ask(B, 100, Lane.SHORT)
    await settled()
    assert short.done()
    await world.serve_all()


async def test_a_tokenizer_is_sent_as_much_as_keeps_its_threads_busy(world: World) -> None:
    world.pool.workers = [worker(threads=4)]
    for _ in range(4 * SHORT_INPUTS_PER_THREAD + 10):
        world.ask(A, 1, Lane.SHORT)
    await settled()
    assert world.turns.num_waiting == 10
    await world.serve_all()
    half = SHORT_BYTES_PER_THREAD // 2
    for _ in range(20):
        world.ask(B, half, Lane.SHORT)
    await settled()
    assert world.turns.num_sent == 2 * 4
    await world.serve_all()


async def test_the_tokenizer_with_the_least_to_do_is_taken(world: World) -> None:
    world.pool.workers = [worker("t0"), worker("t1")]
    turns = [await world.ask(A, 10, Lane.SHORT) for _ in range(4)]
    assert [one.placed_sequences for one in world.pool.workers] == [2, 2]
    for turn in turns:
        turn.release()


async def test_one_that_was_passed_over_is_used_when_there_is_no_other(world: World) -> None:
    first = world.pool.workers[0]
    other = worker("t1")
    (await world.ask(passed_over={"t0"})).release()
    world.pool.workers = [first, other]
    turn = await world.ask(passed_over={"t0"})
    assert turn.worker is other
    waiting = world.ask(passed_over={"t0"})
    await settled()
    assert not waiting.done(), "it waits for the other one"
    turn.release()
    assert (await waiting).worker is other
    (await waiting).release()


async def test_each_model_waits_for_its_own_tokenizers(world: World) -> None:
    world.pool.workers = [worker("t0"), worker("t1", digest="e")]
    turn = await world.ask(A)
    blocked = world.ask(A)
    other = await world.ask(B, digest="e")
    assert other.worker is world.pool.workers[1]
    turn.release()
    other.release()
    (await blocked).release()


async def test_who_finds_no_tokenizer_waits_for_one_and_then_gives_up(world: World) -> None:
    (present,) = world.pool.workers
    world.pool.workers = []
    loop = asyncio.get_running_loop()
    patient = world.ask(give_up=loop.time() + 100)
    impatient = world.ask(B, give_up=loop.time() - 1)
    with pytest.raises(Unavailable):
        await impatient
    world.pool.workers = [present]
    world.changed.set()
    (await patient).release()


async def test_who_runs_out_of_time_leaves_nothing(world: World) -> None:
    turn = await world.ask()
    with pytest.raises(TimeoutError):
        await world.ask(deadline=asyncio.get_running_loop().time() + 0.01)
    assert world.turns.num_waiting == 0
    turn.release()


async def test_who_is_cancelled_as_its_turn_comes_gives_it_to_the_next(world: World) -> None:
    """In the same turn of the loop, before its task can know."""
    turn = await world.ask()
    cancelled, following = world.ask(), world.ask(B)
    await settled()
    turn.release()
    assert world.turns.num_sent == 1
    cancelled.cancel()
    (await following).release()
    assert cancelled.cancelled()


async def test_who_is_cancelled_before_its_turn_comes_does_not_keep_the_next_one(
    world: World,
) -> None:
    turn = await world.ask()
    cancelled, following = world.ask(), world.ask()
    await settled()
    cancelled.cancel()
    turn.release()
    (await following).release()


async def test_nothing_is_left_whenever_who_is_cancelled(world: World) -> None:
    draw = random.Random(5)
    tasks: list[asyncio.Task[WorkerSlot[TokenizerClient]]] = []
    for _ in range(400):
        match draw.randrange(4):
            case 0 | 1:
                lane = draw.choice([*Lane])
                tasks.append(world.ask(draw.choice([A, B, HEAVY]), draw.randrange(99_999), lane))
            case 2 if tasks:
                tasks.pop(draw.randrange(len(tasks))).cancel()
            case _ if world.had:
                world.had.pop(draw.randrange(len(world.had)))[1].release()
        if draw.randrange(2):
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _, turn in world.had:
        turn.release()
    await until(lambda: world.turns.num_waiting == 0)
