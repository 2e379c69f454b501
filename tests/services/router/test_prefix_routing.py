"""A prompt goes to the worker that has most of it cached, also after its news got lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.errors import Overloaded
from batonlm.core.request.request import Request, TokenPrompt
from batonlm.router.config import RouterConfig
from batonlm.router.workers import fleet
from batonlm.router.workers.fleet import Pool
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedWorker
from tests.services.router.conftest import World, until

UNITS = 8
PROMPTS = [tuple(b"%d" % number * (64 * UNITS)) for number in range(2)]
EACH = 6
"""Requests for each prompt: that all of them go right by luck has a chance of 1 in 4096."""


def asking(number: int) -> Request:
    prompt = (*PROMPTS[number], *b"and then?")
    return Request(TokenPrompt(prompt), seed=7, max_tokens=2, ignore_eos=True)


async def known(pool: Pool[Any], units: int) -> None:
    """Waits until the router's index has so many."""
    index = pool.index
    assert index is not None
    await until(lambda: len(index) == units)


async def test_a_prefix_goes_where_it_is_cached(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=32), prefills=2, decodes=2)
    assert world.fleet is not None
    groups: list[tuple[Pool[Any], list[ScriptedWorker]]] = [
        (world.fleet.prefills, [*world.prefills]),
        (world.fleet.decodes, [*world.decodes]),
    ]
    for pool, workers in groups:
        for number, worker in enumerate(workers):
            # Of one prompt less than the other has: less is not enough.
            worker.hold(PROMPTS[number])
            worker.hold(PROMPTS[1 - number][: 64 * 2])
        await known(pool, 2 * (UNITS + 2))
    for number in (0, 1) * EACH:
        before = [len(worker.starts) for worker in world.decodes]
        answer = await world.ask(asking(number))
        assert answer.token_ids[0] == [
            *language.answer((*PROMPTS[number], *b"and then?"), 7, 0, 2, ignore_eos=True)[0]
        ]
        after = [len(worker.starts) for worker in world.decodes]
        assert after[number] == before[number] + 1
        assert after[1 - number] == before[1 - number]
    assert [worker.runs for worker in world.prefills] == [[], []], "its rest is short enough"


@pytest.mark.parametrize("again", [False, True])
async def test_a_prompt_too_long_for_decode_goes_to_the_prefill_worker_that_has_it(
    world: World, again: bool
) -> None:
    await world.start(prefills=2, decodes=1)
    assert world.fleet is not None
    world.prefills[again].hold(PROMPTS[0])
    await known(world.fleet.prefills, UNITS)
    for _ in range(2 * EACH):
        await world.ask(asking(0))
    assert len(world.prefills[again].runs) == 2 * EACH


async def test_a_prefix_is_collected_from_a_worker_that_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "PREFIX_PAUSE_S", 1e9)
    config = RouterConfig(local_prefill_tokens=4096, collect_prefix_tokens=64)
    await world.start(config, prefills=0, decodes=2)
    assert world.fleet is not None
    holder, other = world.decodes
    holder.hold(PROMPTS[0])
    await known(world.fleet.decodes, UNITS)
    # That there is no room where it is to go is not the holder's fault.
    for outcome in ("completed", "full", "failed", "completed"):
        await with_the_holder_full(world, outcome)
    # After one did not come, no more are asked for.
    assert other.prefix_senders == [holder.identity.instance_id] * 3 + [""]
    assert holder.prefix_senders == [""] * 4


async def with_the_holder_full(world: World, outcome: str) -> None:
    holder, other = world.decodes
    holder.refusals = [Overloaded("it is full", retry_after_s=60.0)]
    other.prefix_outcome = outcome
    assert (await world.ask(asking(0))).reason() is not None


async def test_a_worker_that_collects_none_is_not_asked_again(world: World) -> None:
    config = RouterConfig(local_prefill_tokens=4096, collect_prefix_tokens=64)
    await world.start(config, prefills=0, decodes=2)
    assert world.fleet is not None
    holder, other = world.decodes
    holder.hold(PROMPTS[0])
    await known(world.fleet.decodes, UNITS)
    for outcome in ("", "completed"):
        await with_the_holder_full(world, outcome)
    assert other.prefix_senders == [holder.identity.instance_id, ""]


async def test_a_prefix_goes_where_a_tier_has_it(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4096), prefills=0, decodes=2)
    assert world.fleet is not None
    pool, (_, holder) = world.fleet.decodes, world.decodes
    holder.hold(PROMPTS[0], tier="disk")
    await until(lambda: len(pool.tiers) == UNITS)
    for _ in range(2 * EACH):
        await world.ask(asking(0))
    assert [len(worker.starts) for worker in world.decodes] == [0, 2 * EACH]
    await holder.kill()
    await until(lambda: not len(pool.tiers))


async def test_a_gap_in_the_news_heals(world: World) -> None:
    """The worker lives on meanwhile: its client stays, and nobody waits for it."""
    await world.start(RouterConfig(local_prefill_tokens=4096), prefills=0, decodes=2)
    assert world.fleet is not None
    pool, (holder, other) = world.fleet.decodes, world.decodes
    workers = {worker.identity.instance_id: worker for worker in pool.workers()}
    holder.hold(PROMPTS[0])
    other.hold(PROMPTS[1])
    await known(pool, 2 * UNITS)
    holder.cache.losing = True
    holder.hold(PROMPTS[1])
    assert pool.index is not None
    index = pool.index
    await until(lambda: not holder.cache.losing)
    holder.hold(tuple(b"what shows that something is missing" * 4))
    await until(lambda: index.gaps == 1)
    assert (await world.ask(asking(0))).reason() is not None
    await known(pool, 3 * UNITS + 2)
    assert {worker.identity.instance_id: worker for worker in pool.workers()} == workers
    there = len(holder.starts)
    for _ in range(2 * EACH):
        await world.ask(asking(0))
    assert len(holder.starts) == there + 2 * EACH


async def test_a_worker_that_is_gone_is_forgotten(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4096), prefills=0, decodes=2)
    assert world.fleet is not None
    for worker in world.decodes:
        worker.hold(PROMPTS[0])
    await known(world.fleet.decodes, 2 * UNITS)
    await world.decodes[0].kill()
    await known(world.fleet.decodes, UNITS)
    answers = await asyncio.gather(*[world.ask(replace(asking(0), seed=s)) for s in range(3)])
    assert all(answer.reason() is not None for answer in answers)
