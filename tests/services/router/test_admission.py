"""Requests that the router makes wait, in fair order, or refuses; nothing of them is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.admission.fair_queue import DrainRate, Entry
from batonlm.core.admission.tenant_budgets import Limit, Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import DeadlineExceeded, InvalidArgument, Overloaded
from batonlm.core.request.request import TextPrompt
from batonlm.core.routing.load import WorkerSpeed
from batonlm.router.config import RouterConfig
from batonlm.router.request import admission
from batonlm.router.request.dispatcher import Dispatcher, PendingAttempt
from tests.services.router.conftest import Answer, World, until
from tests.services.router.disturbed import REQUEST, check

A, B = Tenant("a"), Tenant("b")


async def few_at_a_time(world: World, places: int = 1, **options: object) -> None:
    """A fleet whose only decode worker runs so many sequences at a time, and stands still."""
    config = RouterConfig(local_prefill_tokens=0, **options)  # type: ignore[arg-type]
    decode = world.new_decode()
    decode.max_sequences = places
    world.decodes.append(decode)
    await world.start(config, decodes=0)
    decode.stepping.clear()


def ask(world: World, *tenants: Tenant, **more: object) -> list[asyncio.Task[Answer]]:
    return [
        asyncio.create_task(world.ask(replace(REQUEST, tenant=tenant, **more)))  # type: ignore[arg-type]
        for tenant in tenants
    ]


@pytest.mark.deep
async def test_a_flood_waits_here_and_another_tenant_is_next(world: World) -> None:
    await few_at_a_time(world)
    decode = world.decodes[0]
    flood = ask(world, *[A] * 6)
    await until(lambda: len(world.pipeline.gate.queue) == 5)
    (other,) = ask(world, B)
    await until(lambda: len(world.pipeline.gate.queue) == 6)
    assert len(decode.starts) == 1, "the worker has as many as it can run"
    decode.stepping.set()
    await asyncio.gather(*flood, other)
    assert [attempt.tenant for attempt in decode.starts[:3]] in (["a", "b", "a"], ["a", "a", "b"])
    await until(world.nothing_left)


async def test_one_cancelled_as_its_turn_comes_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room comes free and the one that waits for it is cancelled, before the loop comes round."""
    turn_soon, wait = Dispatcher.turn_soon, Dispatcher.wait
    waiting: list[asyncio.Task[object]] = []

    async def and_note(dispatcher: Dispatcher, entry: Entry[PendingAttempt]) -> object:
        task = asyncio.current_task()
        assert task is not None
        waiting.append(task)
        return await wait(dispatcher, entry)

    def and_cancel(dispatcher: Dispatcher) -> None:
        turn_soon(dispatcher)
        if not worker.placed_sequences:
            waiting[1].cancel()
            second.cancel()

    monkeypatch.setattr(Dispatcher, "wait", and_note)
    await few_at_a_time(world)
    first, second, third = ask(world, A, A, A)
    await until(lambda: len(world.pipeline.gate.queue) == 2)
    assert world.fleet is not None
    (worker,) = world.fleet.decodes.workers()
    monkeypatch.setattr(Dispatcher, "turn_soon", and_cancel)
    world.decodes[0].stepping.set()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    await until(world.nothing_left)


async def test_priority_comes_before_turns(world: World) -> None:
    await few_at_a_time(world)
    waiting = ask(world, A, A)
    await until(lambda: len(world.pipeline.gate.queue) == 1)
    urgent = ask(world, A, priority=-1)
    await until(lambda: len(world.pipeline.gate.queue) == 2)
    world.decodes[0].stepping.set()
    await asyncio.gather(*waiting, *urgent)
    assert [attempt.priority for attempt in world.decodes[0].starts] == [0, -1, 0]


@pytest.mark.deep
async def test_a_full_queue_refuses_at_once_and_keeps_room_for_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_QUEUED", 4)
    await few_at_a_time(world)
    waiting = ask(world, A, A, A)
    await until(lambda: len(world.pipeline.gate.queue) == 2)
    with pytest.raises(Refusal) as caught:
        await world.pipeline.open(replace(REQUEST, tenant=A))
    assert caught.value.limit is Limit.QUEUE
    assert caught.value.retry_after_s is not None
    assert world.counted("baton_refusals_total", reason="queue") == 1
    waiting += ask(world, B)
    await until(lambda: len(world.pipeline.gate.queue) == 3)
    world.decodes[0].stepping.set()
    await asyncio.gather(*waiting)
    await until(world.nothing_left)


async def test_who_waits_for_longer_than_is_allowed_is_refused(world: World) -> None:
    await few_at_a_time(world, max_queue_s=0.3)
    (running,) = ask(world, A)
    await until(lambda: len(world.decodes[0].starts) == 1)
    with pytest.raises(Refusal) as caught:
        await world.pipeline.open(REQUEST)
    assert caught.value.limit is Limit.WAIT
    assert world.counted("baton_refusals_total", reason="wait") == 1
    world.decodes[0].stepping.set()
    await running
    await until(world.nothing_left)


async def test_all_that_waited_count_towards_the_drain(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also who gets the second of two places that come free together, and never was next."""
    await few_at_a_time(world, places=2)
    running = ask(world, A, A)
    await until(lambda: len(world.decodes[0].starts) == 2)
    waiting = ask(world, A, A, A, A)
    await until(lambda: len(world.pipeline.gate.queue) == 4)
    counted: list[float] = []
    left = DrainRate.left

    def count(drain: DrainRate, tokens: float, now: float) -> None:
        counted.append(tokens)
        left(drain, tokens, now)

    monkeypatch.setattr(DrainRate, "left", count)
    world.decodes[0].stepping.set()
    await asyncio.gather(*running, *waiting)
    assert len(counted) == 4
    await until(world.nothing_left)


async def test_who_would_be_refused_anyway_is_turned_away_unread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_QUEUED", 4)
    await few_at_a_time(world)
    world.pipeline.turn_away(A, 0)
    waiting = ask(world, A, A, A)
    await until(lambda: len(world.pipeline.gate.queue) == 2)
    with pytest.raises(Refusal) as caught:
        world.pipeline.turn_away(A, 0)
    assert caught.value.limit is Limit.QUEUE
    assert world.counted("baton_refusals_total", reason="queue") == 1
    world.pipeline.turn_away(B, 0)
    world.decodes[0].stepping.set()
    await asyncio.gather(*waiting)
    await until(world.nothing_left)


@pytest.mark.deep
async def test_what_goes_on_is_not_refused_however_long_it_waits(world: World) -> None:
    """Its decode worker dies; the other one is full for longer than new requests may wait."""
    for _ in range(2):
        decode = world.new_decode()
        decode.max_sequences = 1
        world.decodes.append(decode)
    await world.start(RouterConfig(local_prefill_tokens=0, max_queue_s=0.2), decodes=0)
    for decode in world.decodes:
        decode.step_s = 0.02
    asked = ask(world, A, A)
    await until(lambda: all(len(d.starts) == 1 and d.holds() for d in world.decodes))
    await until(lambda: sum(len(r.outputs[0]) for r in world.decodes[0].running.values()) > 3)
    world.decodes[1].stepping.clear()
    await world.decodes[0].kill()
    queue = world.pipeline.gate.queue
    await until(lambda: len(queue) == 1)
    await asyncio.sleep(0.5)
    assert len(queue) == 1, "it still waits"
    assert queue.num_bounded == 0
    world.decodes[1].stepping.set()
    for answer in await asyncio.gather(*asked):
        check(answer)
    await until(world.nothing_left)


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
async def test_who_leaves_while_waiting_leaves_nothing(world: World, way: str) -> None:
    await few_at_a_time(world)
    (running,) = ask(world, A)
    await until(lambda: len(world.decodes[0].starts) == 1)
    request = replace(REQUEST, deadline_s=1.0) if way == "deadline" else REQUEST
    opening = asyncio.create_task(world.pipeline.open(request))
    # On a machine that stands still its time may be up before.
    await until(lambda: len(world.pipeline.gate.queue) == 1 or opening.done())
    if way == "cancelled":
        opening.cancel()
    with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
        await opening
    assert len(world.pipeline.gate.queue) == 0
    assert len(world.decodes[0].starts) == 1
    world.decodes[0].stepping.set()
    await running
    await until(world.nothing_left)


async def test_prompts_wait_here_and_not_at_the_prefill_worker(world: World) -> None:
    prefill = world.new_prefill()
    prefill.speed = WorkerSpeed(prefill_step_tokens=16)
    world.prefills.append(prefill)
    await world.start(RouterConfig(local_prefill_tokens=0), prefills=0)
    prefill.computing.clear()
    asked = ask(world, *[A] * 6)
    await until(lambda: len(world.pipeline.gate.queue) > 0 and prefill.running > 0)
    await asyncio.sleep(0.1)
    tokens = [len(attempt.token_ids) for attempt in prefill.runs]
    assert sum(tokens[:-1]) < 2 * 16, "two steps' worth, and whom the last of it was given to"
    prefill.computing.set()
    await asyncio.gather(*asked)
    await until(world.nothing_left)


async def test_a_short_prompt_does_not_wait_for_prefill_behind_long_ones(world: World) -> None:
    """Another tenant's: within one the order stays."""
    prefill = world.new_prefill()
    prefill.speed = WorkerSpeed(prefill_step_tokens=16)
    world.prefills.append(prefill)
    await world.start(RouterConfig(), prefills=0)
    prefill.computing.clear()
    asked = ask(world, *[A] * 3, prompt=TextPrompt("x" * 100))
    await until(lambda: len(world.pipeline.gate.queue) == 2)
    (short,) = ask(world, B)
    check(await short)
    assert len(world.pipeline.gate.queue) == 2
    prefill.computing.set()
    await asyncio.gather(*asked)
    await until(world.nothing_left)


LIMITS = [
    (Tenant("a", requests_per_minute=6), Limit.REQUEST_RATE),
    (Tenant("a", tokens_per_minute=60), Limit.TOKEN_RATE),
    (Tenant("a", max_requests=1), Limit.TENANT_REQUESTS),
    (Tenant("a", max_tokens=40), Limit.TENANT_TOKENS),
]


@pytest.mark.deep
@pytest.mark.parametrize(("tenant", "limit"), LIMITS, ids=[limit.value for _, limit in LIMITS])
async def test_a_tenant_gets_no_more_than_its_limits(
    world: World, tenant: Tenant, limit: Limit
) -> None:
    await world.start()
    world.decodes[0].stepping.clear()
    stream = await world.pipeline.open(replace(REQUEST, tenant=tenant))
    with pytest.raises(Overloaded) as caught:
        await world.pipeline.open(replace(REQUEST, tenant=tenant))
    assert isinstance(caught.value, Refusal) and caught.value.limit is limit
    assert world.counted("baton_refusals_total", reason=limit.value) == 1
    world.decodes[0].stepping.set()
    check(await world.ask(replace(REQUEST, tenant=B)))
    await stream.aclose()
    await until(world.nothing_left)


async def test_more_urgency_than_a_tenant_may_have_names_the_field(world: World) -> None:
    await world.start()
    with pytest.raises(InvalidArgument) as caught:
        await world.pipeline.open(replace(REQUEST, tenant=Tenant("a", most_urgent=0), priority=-1))
    assert caught.value.field == "priority"
    assert world.pipeline.num_requests == 0
