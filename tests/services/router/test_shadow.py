"""Shadow requests: another model gets what a name's model gets, and no real request notices."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Internal
from batonlm.core.request.request import SamplingParams, TextPrompt
from batonlm.core.routing.aliases import Alias, Shadow
from batonlm.router.config import RouterConfig
from batonlm.router.request.shadow import MAX_SHADOWS, ShadowRun
from tests.services.router.conftest import PATIENCE_S, World, until
from tests.services.router.disturbed import PROMPT, REQUEST, check
from tests.services.router.test_many_models import workers_of

CONFIG = RouterConfig(local_prefill_tokens=0, wait_timeout_s=PATIENCE_S)
GREEDY = replace(REQUEST, model="chat", sampling=SamplingParams(temperature=0.0))


async def start(world: World, share: float = 1.0, config: RouterConfig = CONFIG) -> None:
    """chat stands for small, whose shadow is large; both have one tokenizer."""
    world.aliases["chat"] = Alias((("small", 1),), shadow=Shadow("large", share))
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d2", tokenizer="t1")
    world.decodes[1].max_sequences = MAX_SHADOWS
    await world.run(config)


def shadows(world: World, outcome: str, name: str = "requests") -> float:
    labels = {"alias": "chat", "model": "large", "outcome": outcome}
    return world.counted(f"baton_shadow_{name}_total", **labels)


async def test_both_models_answer_and_one_is_heard_paid_and_counted(world: World) -> None:
    await start(world)
    # The tenant has tokens for one answer, and may run one request.
    tokens = len(PROMPT) + 120
    tenant = Tenant("one", tokens_per_minute=tokens, max_requests=1, max_tokens=tokens)
    answer = await world.ask(replace(GREEDY, tenant=tenant))
    check(answer)
    assert answer.accepted.model == "small"
    await until(lambda: shadows(world, "finished") == 1)
    assert [each.tenant for each in world.decodes[1].starts] == ["(shadow)"]
    (sent,), (real,) = world.decodes[1].starts, world.decodes[0].starts
    assert sent.priority > real.priority and sent.sampling == real.sampling
    await until(lambda: shadows(world, "equal", "comparisons") == 1)
    assert world.counted("baton_shadow_request_seconds_count", alias="chat", model="large") == 1
    assert world.counted("baton_requests_total", outcome="finished") == 1
    assert world.counted("baton_prompt_tokens_total") == len(PROMPT)
    await until(world.nothing_left)


async def test_only_a_share_of_the_name_and_only_greedy_answers_are_compared(world: World) -> None:
    await start(world, 0.5)
    brief = replace(REQUEST, max_tokens=2)
    for _ in range(40):
        await world.ask(replace(brief, model="chat"))
    await until(lambda: shadows(world, "finished") == len(world.decodes[1].starts))
    sent = len(world.decodes[1].starts)
    assert 2 < sent < 38
    for _ in range(10):
        await world.ask(replace(brief, model="small"))
    await until(world.nothing_left)
    assert len(world.decodes[1].starts) == sent
    assert not shadows(world, "equal", "comparisons")
    assert not shadows(world, "different", "comparisons")


async def test_a_shadow_that_fails_is_counted_and_nothing_else(world: World) -> None:
    await start(world)
    for worker in (world.prefills[1], world.decodes[1]):
        worker.refusals.append(Internal("It fails."))
    check(await world.ask(GREEDY))
    await until(lambda: shadows(world, "internal") == 1)
    assert world.counted("baton_requests_total", outcome="finished") == 1
    assert not world.counted("baton_retries_total")
    # A model that is not there costs nothing either.
    await world.decodes[1].kill()
    await until(lambda: world.met()["decode"] == 1)
    check(await world.ask(GREEDY))
    assert shadows(world, "dropped") == 1
    await until(world.nothing_left)


async def test_shadows_are_few_and_give_way_to_a_request_that_would_wait(world: World) -> None:
    await start(world)
    large = world.decodes[1]
    large.stepping.clear()
    for _ in range(MAX_SHADOWS + 3):
        check(await world.ask(GREEDY))
    await until(lambda: len(large.starts) == MAX_SHADOWS)
    await until(lambda: shadows(world, "dropped") == 3)
    # All places of the shadow's model are taken. A real request for it waits for none of them.
    asked = asyncio.create_task(world.ask(replace(REQUEST, model="large")))
    await until(lambda: len(large.starts) == MAX_SHADOWS + 1)
    assert shadows(world, "dropped") == MAX_SHADOWS + 3
    large.stepping.set()
    check(await asked)
    await until(world.nothing_left)


async def test_a_router_that_leaves_waits_for_no_shadow(world: World) -> None:
    await start(world)
    world.decodes[1].stepping.clear()
    check(await world.ask(GREEDY))
    await until(lambda: len(world.decodes[1].starts) == 1)
    async with asyncio.timeout(PATIENCE_S):
        await world.pipeline.drain()
    await until(lambda: shadows(world, "dropped") == 1)
    await until(world.nothing_left)


async def test_ids_of_tokens_go_to_no_model_with_another_tokenizer(world: World) -> None:
    world.aliases["chat"] = Alias((("small", 1),), shadow=Shadow("large", 1.0))
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d2", tokenizer="t2")
    await world.run(CONFIG)
    check(await world.ask(GREEDY))
    await until(lambda: shadows(world, "finished") == 1)
    await world.ask(replace(GREEDY, stop_token_ids=(1,)))
    assert shadows(world, "dropped") == 1
    assert len(world.decodes[1].starts) == 1
    assert isinstance(GREEDY.prompt, TextPrompt)
    assert not shadows(world, "equal", "comparisons"), "tokens of two tokenizers say nothing"
    await until(world.nothing_left)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(((1, 2),), ((1, 2),), True), (((1, 2),), ((1, 3),), False), (None, ((1,),), None)],
)
def test_two_answers_are_compared_once_both_are_there(
    one: tuple[tuple[int, ...], ...] | None,
    other: tuple[tuple[int, ...], ...],
    expected: bool | None,
) -> None:
    found: list[bool] = []
    run = ShadowRun(lambda a, b: found.append(a == b))
    run.ended(one)
    assert not found
    run.ended(other)
    assert found == ([] if expected is None else [expected])
