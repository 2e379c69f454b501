"""One router over the workers of two models: each request is served by workers of its own model,
and what happens to one model's workers does not touch the other's requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import (
    BatonError,
    Internal,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    Unavailable,
    model_not_found,
)
from batonlm.core.request.model import AdapterDescription
from batonlm.core.request.request import ChatPrompt, Message, Request
from batonlm.core.routing.aliases import Alias, conversation
from batonlm.core.routing.step_back import LEAST
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.inference import listed_models
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.router.config import RouterConfig
from batonlm.router.observe.gauges import pool_targets
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.workers.discovery import Replicas
from batonlm.testing import language
from batonlm.testing.scripted import (
    ScriptedDecode,
    ScriptedDetokenizer,
    ScriptedPrefill,
    ScriptedTokenizer,
)
from tests.services.router.conftest import PATIENCE_S, World, until
from tests.services.router.disturbed import REQUEST, begin, begin_and_pause, check, finish

BOTH = RouterConfig(local_prefill_tokens=0, model=("small", "large"), wait_timeout_s=PATIENCE_S)

FRENCH = AdapterDescription("french", "f1", 8, 100)


def workers_of(world: World, name: str, *, digest: str, tokenizer: str) -> None:
    """Adds one worker of each role. The scripted tokens are the same for all models."""
    model = replace(language.MODEL, name=name, digest=digest, tokenizer_digest=tokenizer)
    layout = replace(language.LAYOUT, model_digest=digest)
    world.tokenizers.append(ScriptedTokenizer(model=model))
    world.prefills.append(ScriptedPrefill(world.network, model=model, layout=layout))
    world.decodes.append(ScriptedDecode(world.network, model=model, layout=layout))
    world.detokenizers.append(ScriptedDetokenizer(model=model))


async def start(world: World, config: RouterConfig = BOTH, *, same: bool = False) -> None:
    """small's workers come first. same: both models have the same weights and tokenizer."""
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d1" if same else "d2", tokenizer="t1" if same else "t2")
    await world.run(config)


def ran(world: World, index: int) -> int:
    """The attempts that a model's engine workers had; every one needs both."""
    prefills, starts = len(world.prefills[index].runs), len(world.decodes[index].starts)
    assert prefills == starts
    return starts


@pytest.mark.parametrize("same", [False, True])
async def test_each_request_has_workers_of_its_model(world: World, same: bool) -> None:
    await start(world, same=same)
    wanted = ["large", "small", "large", "large", ""]
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(
            *(world.ask(replace(REQUEST, model=name)) for name in wanted)
        )
    for answer, name in zip(answers, wanted, strict=True):
        check(answer)
        # Requests without a name are for the model that is named first.
        assert answer.accepted.model == (name or "small")
    assert (ran(world, 0), ran(world, 1)) == (2, 3)
    if not same:
        assert [len(one.begun) for one in world.tokenizers] == [2, 3]
        assert [len(one.openings) for one in world.detokenizers] == [2, 3]
    assert [model.name for model in world.pipeline.models()] == ["large", "small"]


async def test_a_model_that_loses_its_workers_leaves_the_other_alone(world: World) -> None:
    await start(world)
    large, answer, _ = await begin_and_pause(world, replace(REQUEST, model="large"), 12)
    small, other = await begin(world, replace(REQUEST, model="small"), 3)
    address = world.addresses["decode"][1]
    await world.decodes[1].kill()
    await until(lambda: len(world.pipeline.models()) == 1)
    check(await finish(small, other))
    # New requests of the one are served, of the other wait: it is down, not unknown.
    waiting = asyncio.create_task(world.ask(replace(REQUEST, model="large")))
    for _ in range(3):
        check(await world.ask(replace(REQUEST, model="small")))
    assert not waiting.done()
    model, layout = world.decodes[1].model, world.decodes[1].layout
    again = ScriptedDecode(world.network, model=model, layout=layout)
    world.decodes.append(again)
    await again.start(address)
    check(await finish(large, answer))
    check(await waiting)
    assert again.starts and len(world.decodes[0].starts) == 4
    assert world.counted("baton_retries_total") <= 1
    await until(world.nothing_left)


async def test_what_waits_for_one_model_holds_up_nothing_of_another(world: World) -> None:
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d2", tokenizer="t2")
    busy = world.decodes[1]
    busy.max_sequences = 1
    busy.stepping.clear()
    await world.run(BOTH)
    large = [asyncio.create_task(world.ask(replace(REQUEST, model="large"))) for _ in range(3)]
    await until(lambda: len(world.pipeline.gate.queue) == 2)
    for _ in range(2):
        check(await world.ask(replace(REQUEST, model="small")))
    assert len(world.pipeline.gate.queue) == 2
    busy.stepping.set()
    for task in large:
        check(await task)
    await until(world.nothing_left)


async def test_a_tokenizer_that_is_gone_holds_up_no_texts_of_another_model(world: World) -> None:
    await start(world)
    address = world.addresses["tokenizer"][1]
    await world.tokenizers[1].kill()
    await until(lambda: world.met()["tokenizer"] == 1)
    waiting = asyncio.create_task(world.ask(replace(REQUEST, model="large")))
    await until(lambda: world.pipeline.num_requests == 1)
    for _ in range(2):
        check(await world.ask(replace(REQUEST, model="small")))
    assert not waiting.done()
    again = ScriptedTokenizer(model=world.tokenizers[1].model)
    world.tokenizers.append(again)
    await again.start(address)
    check(await waiting)
    await until(world.nothing_left)


async def test_adapters_of_a_model_that_is_down_wait_for_it(world: World) -> None:
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d2", tokenizer="t2")
    for worker in (world.prefills[0], world.decodes[0]):
        worker.change_adapters(FRENCH)
    await world.run(BOTH)
    check(await world.ask(replace(REQUEST, model="french")))
    address = world.addresses["decode"][0]
    await world.decodes[0].kill()
    await until(lambda: len(world.pipeline.models()) == 1)
    waiting = [
        asyncio.create_task(world.ask(replace(REQUEST, model=name)))
        for name in ("french", "small:french")
    ]
    # A name of an adapter alone does not say which model has to start.
    await until(lambda: world.pipeline.held_by_model() == {"french": 1, "small": 1})
    for name in ("large:french", "other:french", "small:spanish", "spanish"):
        with pytest.raises(ModelNotFound):
            await world.ask(replace(REQUEST, model=name))
    again = ScriptedDecode(
        world.network, model=world.decodes[0].model, layout=world.decodes[0].layout
    )
    again.change_adapters(FRENCH)
    world.decodes.append(again)
    await again.start(address)
    for task in waiting:
        check(await task)
    assert {each.adapter for each in again.starts} == {"f1"}
    await until(world.nothing_left)


async def test_what_waits_for_a_model_ends_when_its_router_has_to(world: World) -> None:
    workers_of(world, "small", digest="d1", tokenizer="t1")
    await world.run(BOTH)
    for call in (world.ask, world.pipeline.tokenize):
        request = replace(REQUEST, model="large")
        waiting = asyncio.create_task(call(request))
        await until(lambda: world.pipeline.held_by_model() == {"large": 1})
        world.pipeline.cut()
        with pytest.raises(Unavailable, match="leaving"):
            await waiting
        world.pipeline.draining = False
    await until(world.nothing_left)


async def test_a_model_without_workers_is_awaited_no_longer_than_others(world: World) -> None:
    workers_of(world, "small", digest="d1", tokenizer="t1")
    await world.run(replace(BOTH, wait_timeout_s=0.2))
    with pytest.raises(Unavailable, match="No decode worker is ready for this model"):
        await world.ask(replace(REQUEST, model="large"))
    await until(world.nothing_left)


@pytest.mark.parametrize("config", [BOTH, replace(BOTH, model=())], ids=["named", "found"])
async def test_an_unknown_model_is_answered_with_the_nearest(
    world: World, config: RouterConfig
) -> None:
    await start(world, config)
    with pytest.raises(ModelNotFound) as caught:
        await world.ask(replace(REQUEST, model="lage"))
    assert caught.value.message == (
        "This server has no model 'lage': it serves 'large', 'small'. Did you mean 'large'?"
    )


def turn(number: int, *later: str) -> Request:
    """A turn of one of many conversations."""
    roles = ["user", "assistant"] * len(later)
    messages = (
        Message("system", "Be brief."),
        Message("user", f"question {number}"),
        *(Message(role, text) for role, text in zip(roles[1:], later, strict=False)),
    )
    return replace(REQUEST, prompt=ChatPrompt(messages), model="chat", max_tokens=1)


async def test_a_name_sends_each_conversation_to_one_model_by_weight(world: World) -> None:
    world.aliases["chat"] = Alias((("small", 3), ("large", 1)))
    await start(world, replace(BOTH, model=()))
    first = [(await world.ask(turn(number))).accepted.model for number in range(48)]
    assert first.count("large") == [
        world.aliases["chat"].model(conversation(turn(number)), ("small", "large"))
        for number in range(48)
    ].count("large")
    assert 0 < first.count("large") < 24
    later = [(await world.ask(turn(n, "answer", "more"))).accepted.model for n in range(48)]
    assert later == first, "a conversation stays where it was"
    world.aliases["chat"] = world.aliases["chat"].changed((("large", 1),))
    assert (await world.ask(turn(first.index("small")))).accepted.model == "large"
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "baton",
        "gen_ai_request_model": "chat",
        "error_type": "",
    }
    counted = [
        world.counted(
            "gen_ai_server_request_duration_seconds_count", gen_ai_response_model=model, **labels
        )
        for model in ("small", "large")
    ]
    assert counted == [2 * first.count("small"), 2 * first.count("large") + 1]


async def test_a_canary_gets_traffic_as_soon_as_it_is_there_and_not_before(world: World) -> None:
    """And gives it back when its last worker has gone."""
    world.aliases["chat"] = Alias((("small", 1), ("large", 1)))
    workers_of(world, "small", digest="d1", tokenizer="t1")
    await world.run(replace(BOTH, model=()))
    conversations = [n for n in range(40) if chosen(world, n) == "large"][:8]
    assert len(conversations) == 8

    async def models() -> set[str]:
        return {(await world.ask(turn(number))).accepted.model for number in conversations}

    assert await models() == {"small"}
    model = replace(language.MODEL, name="large")
    canary = ScriptedDecode(world.network, model=model)
    world.decodes.append(canary)
    address = await canary.start()
    world.listed["decode"].set((*world.addresses["decode"], address))
    await until(lambda: len(world.pipeline.models()) == 2)
    assert await models() == {"large"}
    await canary.kill()
    await until(lambda: len(world.pipeline.models()) == 1)
    assert await models() == {"small"}


async def test_a_model_that_fails_loses_what_it_was_given(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = Alias((("small", 1),))
    alias = world.aliases["chat"] = before.changed((("small", 1), ("large", 1)))
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d2", tokenizer="t2")
    for worker in (*world.prefills, *world.decodes):
        worker.change_adapters(FRENCH)
    await world.run(replace(BOTH, model=(), max_attempts=1))
    conversations = [n for n in range(200) if chosen(world, n) == "large"][: LEAST + 1]
    for worker in (world.prefills[1], world.decodes[1]):
        worker.refusals += [Internal("It fails.") for _ in range(LEAST)]
    for number in conversations[:-1]:
        with pytest.raises(BatonError):
            await world.ask(turn(number))
    assert (await world.ask(turn(conversations[-1]))).accepted.model == "small"
    (record,) = [each for each in caplog.records if "former weights" in each.getMessage()]
    assert "chat goes back to its former weights on this router: large fails" in record.getMessage()
    # So do its adapters.
    french = [replace(turn(number), model="chat:french") for number in range(40)]
    to_large = [one for one in french if alias.model(conversation(one), BOTH.model) == "large"]
    begun = len(world.prefills[0].runs)
    assert (await world.ask(to_large[0])).accepted.model == "french"
    assert [each.adapter for each in world.prefills[0].runs[begun:]] == ["f1"]
    # Until the operator says something else.
    world.aliases["chat"] = before.changed((("large", 1),))
    world.prefills[1].refusals.clear()
    world.decodes[1].refusals.clear()
    assert (await world.ask(turn(conversations[-1]))).accepted.model == "large"
    await until(world.nothing_left)


def chosen(world: World, number: int) -> str:
    return world.aliases["chat"].model(conversation(turn(number)), ("small", "large"))


SLEEPS = replace(BOTH, model=("small",), idle_timeout_s=300.0, max_requests=8)


async def test_a_model_without_workers_holds_its_first_requests_and_asks_for_one(
    world: World,
) -> None:
    workers_of(world, "small", digest="d1", tokenizer="t1")
    sleeping, address = world.decodes.pop(), "127.0.0.1:0"
    await world.run(SLEEPS)
    metrics = RouterMetrics(CollectorRegistry())
    assert world.fleet is not None
    targets = pool_targets(world.pipeline, world.fleet, SLEEPS, metrics, Replicas(None))
    assert world.pipeline.ready(), "clients' requests have to come here"
    assert targets.read() == {("small", "prefill"): 0, ("small", "decode"): 0}
    greedy, other = Tenant("greedy"), Tenant("other")
    asked = [
        asyncio.create_task(world.ask(replace(REQUEST, model=model, tenant=tenant)))
        for model, tenant in (("small", greedy), ("", greedy), ("small", other))
    ]
    await until(lambda: world.pipeline.held_by_model() == {"small": 3})
    assert targets.read()["small", "decode"] == 1
    # It is listed, under its other names, too.
    world.aliases["chat"] = Alias((("small", 1),))
    assert [(model.name, model.max_model_len) for model in world.pipeline.all_models()] == [
        ("small", 0)
    ]
    assert world.pipeline.aliased().keys() == {"chat"}
    listed = {model.name: model.max_model_len for model in listed_models(world.pipeline).models}
    assert listed == {"small": 0, "chat": 0}
    app = HttpApp(world.pipeline, CollectorRegistry(), HttpAccess(OpenAuthenticator()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        data = (await client.get("/v1/models")).json()["data"]
    assert {each["id"]: each["max_model_len"] for each in data} == {"small": None, "chat": None}
    # A quarter of the router's requests is the most of one tenant.
    with pytest.raises(Overloaded, match="wait for this model"):
        await world.ask(replace(REQUEST, tenant=greedy))
    gone = asyncio.create_task(world.ask(replace(REQUEST, tenant=other)))
    await until(lambda: world.pipeline.held_by_model() == {"small": 4})
    gone.cancel()
    await until(lambda: world.pipeline.held_by_model() == {"small": 3})
    world.decodes.append(sleeping)
    address = await sleeping.start()
    world.listed["decode"].set([address])
    for task in asked:
        check(await task)
    assert not world.pipeline.held_by_model()
    assert targets.read()["small", "decode"] == 1
    await until(world.nothing_left)


def test_a_model_that_may_sleep_has_a_name_and_targets() -> None:
    for changed in ({"model": ()}, {"target_first_token_ms": 0.0}):
        with pytest.raises(InvalidArgument) as caught:
            replace(SLEEPS, **changed)
        assert caught.value.field == "idle_timeout_s"


@pytest.mark.parametrize("names", [["m", "b" * 300], [f"adapter-{i}" for i in range(5000)]])
def test_the_nearest_of_any_number_of_names_is_found(names: list[str]) -> None:
    for name in names[1 :: max(1, len(names) // 50)]:
        message = model_not_found(name[:-1] + "_", names).message
        assert len(message) < 2000 and "Did you mean" in message
    assert "Did you mean" not in model_not_found("zzzz" * 10000, names).message
