"""Requests for LoRA adapters run on workers that have them, wherever they go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.admission.tenants import AdapterLimits, Tenant
from batonlm.core.errors import ModelNotFound, NotFound, Overloaded
from batonlm.core.kvcache.prefix import prefix_hashes
from batonlm.core.request.model import AdapterDescription
from batonlm.core.request.request import TextPrompt
from batonlm.core.routing.load import WorkerState
from batonlm.router.config import RouterConfig
from batonlm.testing import language
from tests.services.router.conftest import PATIENCE_S, World, until
from tests.services.router.disturbed import REQUEST, begin, begin_and_pause, check, finish

NAME = language.MODEL.name
SPLIT = RouterConfig(local_prefill_tokens=0, wait_timeout_s=PATIENCE_S)
FRENCH = AdapterDescription("french", "f1", 8, 100)
LEGAL = AdapterDescription("org/legal", "l1", 8, 100)


async def start(world: World, config: RouterConfig = SPLIT) -> None:
    """Two prefill and two decode workers: the first of each has both adapters, the others one."""
    world.add(prefills=2, decodes=2)
    for pool in (world.prefills, world.decodes):
        pool[0].change_adapters(FRENCH, LEGAL)
        pool[1].change_adapters(FRENCH)
    await world.run(config)


def digests(world: World) -> list[set[str]]:
    """The adapters of the attempts that each worker ran."""
    runs = [one.runs for one in world.prefills]
    return [{each.adapter for each in found} for found in runs]


async def test_only_workers_that_have_it_run_it(world: World) -> None:
    await start(world)
    for name in ("org/legal", f"{NAME}:org/legal"):
        check(await world.ask(replace(REQUEST, model=name)))
        for _ in range(4):
            answer = await world.ask(replace(REQUEST, model=name, max_tokens=2))
            assert answer.accepted.model == "org/legal"
    assert digests(world) == [{"l1"}, set()]
    assert not world.decodes[1].starts
    check(await world.ask(replace(REQUEST, model=NAME)))
    assert {name for _, name in listed(world)} == {"french", "org/legal"}
    await until(world.nothing_left)


def listed(world: World) -> list[tuple[str, str]]:
    return [(model.name, adapter.name) for model, adapter in world.pipeline.adapters()]


async def test_attempts_with_an_adapter_that_all_have_keep_the_order_of_the_others(
    world: World,
) -> None:
    await start(world)
    fleet = world.fleet
    assert fleet is not None
    await until(lambda: fleet.all_have_adapter(language.MODEL.digest, "f1"))
    assert not fleet.all_have_adapter(language.MODEL.digest, "l1")


async def test_an_unknown_one_is_answered_with_the_nearest(world: World) -> None:
    await start(world)
    for name in ("frensh", f"{NAME}:frensh", "other:french", ":", "french:", "x" * 250):
        with pytest.raises(ModelNotFound) as caught:
            await world.ask(replace(REQUEST, model=name))
        assert len(caught.value.message) < 2000
    with pytest.raises(ModelNotFound, match="Did you mean 'french'"):
        await world.ask(replace(REQUEST, model="frensh"))


async def test_a_lost_worker_is_replaced_by_one_that_has_it(world: World) -> None:
    await start(world)
    world.decodes[1].change_adapters(FRENCH, LEGAL)
    world.prefills[1].change_adapters(FRENCH, LEGAL)
    stream, answer, ran = await begin_and_pause(world, replace(REQUEST, model="org/legal"), 12)
    await ran.kill()
    check(await finish(stream, answer))
    attempts = [start for one in world.decodes for start in one.starts]
    assert len(attempts) == 2 and {one.adapter for one in attempts} == {"l1"}


async def test_it_waits_for_a_decode_worker_that_comes_back_without_it(world: World) -> None:
    await start(world)
    address = world.addresses["decode"][0]
    stream, answer, ran = await begin_and_pause(world, replace(REQUEST, model="org/legal"), 12)
    assert ran is world.decodes[0]
    await ran.kill()
    waiting = asyncio.create_task(world.ask(replace(REQUEST, model="org/legal")))
    for _ in range(2):
        check(await world.ask(replace(REQUEST, model="french")))
    assert not waiting.done()
    again = type(world.decodes[0])(world.network)
    await again.start(address)
    check(await world.ask(replace(REQUEST, model="french")))
    assert not waiting.done() and not {s.adapter for s in again.starts} - {"f1"}
    again.change_adapters(FRENCH, LEGAL)
    check(await finish(stream, answer))
    check(await waiting)
    await again.kill()


async def test_a_request_fails_at_once_whose_adapter_was_unloaded_before_its_retry(
    world: World,
) -> None:
    await start(world)
    stream, answer, ran = await begin_and_pause(world, replace(REQUEST, model="org/legal"))
    for pool in (world.prefills, world.decodes):
        pool[0].change_adapters(FRENCH)
    await until(lambda: listed(world) == [(NAME, "french")])
    await ran.kill()
    with pytest.raises(NotFound, match="unloaded"):
        await finish(stream, answer)
    await stream.aclose()
    check(await world.ask(replace(REQUEST, model="french")))


async def test_a_tenants_use_of_an_adapter_is_limited_by_its_name(world: World) -> None:
    await start(world)
    tenant = Tenant("acme", adapters={"org/legal": AdapterLimits(requests_per_minute=6)})
    for name in ("org/legal", f"{NAME}:org/legal"):
        request = replace(REQUEST, model=name).of(tenant)
        if name == "org/legal":
            check(await world.ask(request))
            continue
        with pytest.raises(Overloaded, match="org/legal: More than 6 requests") as refused:
            await world.ask(request)
        assert refused.value.retry_after_s is not None and refused.value.field == "model"
    for other in ("french", NAME):
        check(await world.ask(replace(REQUEST, model=other).of(tenant)))
    check(await world.ask(replace(REQUEST, model="org/legal").of(Tenant("other"))))
    await until(world.nothing_left)


async def test_what_a_worker_drops_is_not_offered_any_more(world: World) -> None:
    await start(world)
    await until(lambda: len(listed(world)) == 2)
    world.decodes[0].change_adapters(FRENCH)
    await until(lambda: listed(world) == [(NAME, "french")])
    with pytest.raises(ModelNotFound):
        await world.ask(replace(REQUEST, model="org/legal"))
    # The same name means what was loaded last.
    for pool in (world.prefills, world.decodes):
        for worker in pool:
            worker.change_adapters(replace(FRENCH, digest="f2"))
    await until(lambda: [each.digest for _, each in world.pipeline.adapters()] == ["f2"])
    check(await world.ask(replace(REQUEST, model="french")))
    assert {digest for found in digests(world) for digest in found} == {"f2"}


async def test_a_leaving_worker_moves_its_sequences_to_one_that_has_it(world: World) -> None:
    await start(world)
    stream, answer = await begin(world, replace(REQUEST, model="org/legal"), 12)
    world.decodes[0].state = WorkerState.DRAINING
    for _ in range(3):
        check(await world.ask(replace(REQUEST, model="french")))
    # The other one does not have it: the sequence stays where it is.
    check(await finish(stream, answer))
    assert {start.adapter for start in world.decodes[1].starts} == {"f1"}


async def test_prompts_with_an_adapter_are_compared_with_its_own_prefixes(world: World) -> None:
    await start(world)
    text = "tell me all about the prefixes of prompts, and do it at length. " * 20
    request = replace(REQUEST, prompt=TextPrompt(text), max_tokens=4)
    ids = tuple(text.encode())
    world.prefills[0].hold(ids)
    world.prefills[1].hold(ids, "f1")
    assert world.fleet is not None
    fleet = world.fleet
    keys = [prefix_hashes(ids, b"", language.MODEL.tokenizer_digest, d) for d in ("", "f1")]
    await until(lambda: all(fleet.prefills.view(key).overlap.most(1, 0) for key in keys))
    for name, ran in ((NAME, 0), ("french", 1)) * 4:
        before = [len(one.runs) for one in world.prefills]
        await world.ask(replace(request, model=name))
        after = [len(one.runs) for one in world.prefills]
        assert after[ran] == before[ran] + 1, (name, before, after)
