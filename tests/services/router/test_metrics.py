"""What the router's metrics say of requests, against what really happened to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from batonlm.core.admission.tenant_budgets import Limit, Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import ModelNotFound, Unavailable
from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.request import Request, TextPrompt
from batonlm.router.config import RouterConfig
from batonlm.router.observe.gauges import leaks
from batonlm.router.observe.metrics import MAX_TENANTS, OTHER_TENANTS, RouterMetrics, TenantBlind
from tests.services.router.conftest import World, until

PROMPT = "one prompt, told once"
REQUEST = Request(TextPrompt(PROMPT), seed=7, max_tokens=40, ignore_eos=True)


async def test_what_really_happened_is_counted(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4))
    await world.ask(REQUEST)
    await world.ask(replace(REQUEST, prompt=TextPrompt("abc")))
    assert world.counted("baton_inter_token_seconds_count") == 2 * 39
    with pytest.raises(ModelNotFound):
        await world.ask(replace(REQUEST, model="other"))
    await (await world.pipeline.open(replace(REQUEST, max_tokens=3000))).aclose()
    await until(world.nothing_left)
    assert world.counted("baton_remote_prefill_total") >= 1
    assert world.counted("baton_local_prefill_total") == 1
    assert world.counted("baton_kv_bytes_total") >= 1000
    assert world.counted("baton_time_to_first_token_seconds_count") == 2
    assert world.counted("baton_prompt_tokens_total") == 2 * len(PROMPT.encode()) + 3
    outcomes = {
        outcome: world.counted("baton_requests_total", outcome=outcome)
        for outcome in ("finished", "model_not_found", "cancelled")
    }
    assert outcomes == {"finished": 2, "model_not_found": 1, "cancelled": 1}


async def test_what_is_held_is_a_leak_only_without_requests(world: World) -> None:
    await world.start()
    window = world.pipeline.gate.dispatcher.window
    window.take(7)
    kind = ("window_tokens",)
    assert leaks(1, world.pipeline.held)[kind] == 0
    assert leaks(0, world.pipeline.held)[kind] == 7
    window.give_back(7)
    assert leaks(0, world.pipeline.held)[kind] == 0


async def test_requests_are_held_against_objectives(world: World) -> None:
    """What a client spoils says nothing of Baton; what Baton refuses for want of room does."""
    await world.start(RouterConfig(target_first_token_ms=60_000.0, target_between_tokens_ms=0.1))
    acme = replace(REQUEST, tenant=Tenant("acme"))
    await world.ask(acme)
    await world.ask(replace(acme, max_tokens=1))
    with pytest.raises(ModelNotFound):
        await world.ask(replace(acme, model="other"))
    await (await world.pipeline.open(replace(acme, max_tokens=3000))).aclose()
    await until(world.nothing_left)

    def counted(objective: str, outcome: str) -> float:
        name = "baton_tenant_objectives_total"
        return world.counted(name, tenant="acme", objective=objective, outcome=outcome)

    assert (counted("first_token", "met"), counted("first_token", "missed")) == (2, 0)
    assert counted("between_tokens", "met") + counted("between_tokens", "missed") == 1
    metrics = world.pipeline.services.metrics
    metrics.refused(Limit.QUEUE, acme.tenant)
    metrics.refused(Limit.REQUEST_RATE, acme.tenant)
    assert (counted("first_token", "met"), counted("first_token", "missed")) == (2, 1)
    metrics.judged(acme.tenant, Unavailable("lost"), StageTimes(first_token_s=1.0), ())
    assert counted("first_token", "missed") == 2
    metrics.judged(acme.tenant, None, StageTimes(first_token_s=61.0, total_s=62.0), ())
    assert counted("first_token", "missed") == 3


async def test_tenants_are_counted_by_name(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4))
    acme = replace(REQUEST, tenant=Tenant("acme"))
    await world.ask(acme)
    await world.ask(REQUEST)
    with pytest.raises(ModelNotFound):
        await world.ask(replace(acme, model="other"))
    narrow = replace(acme, tenant=Tenant("narrow", requests_per_minute=1))
    await world.ask(narrow)
    with pytest.raises(Refusal):
        await world.ask(narrow)
    await until(world.nothing_left)
    tokens = "baton_tenant_tokens_total"
    for name in ("acme", OTHER_TENANTS):
        assert world.counted(tokens, tenant=name, kind="prompt") == len(PROMPT.encode())
        assert world.counted(tokens, tenant=name, kind="output") == 40
        first = world.counted("baton_tenant_time_to_first_token_seconds_count", tenant=name)
        assert first == 1
    ended = "baton_tenant_requests_total"
    assert world.counted(ended, tenant="acme", outcome="finished") == 1
    assert world.counted(ended, tenant="acme", outcome="model_not_found") == 1
    assert world.counted(ended, tenant="narrow", outcome="overloaded") == 1
    why = Limit.REQUEST_RATE.value
    assert world.counted("baton_tenant_refusals_total", tenant="narrow", reason=why) == 1


def test_there_are_only_so_many_tenants() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for number in range(MAX_TENANTS + 5):
        metrics.accepted(Tenant(f"t{number}"), "m", 1)
    metrics.accepted(Tenant("t0"), "m", 1)
    name = "baton_tenant_tokens_total"
    last = {"tenant": f"t{MAX_TENANTS - 1}", "kind": "prompt"}
    beyond = {"tenant": f"t{MAX_TENANTS}", "kind": "prompt"}
    others = {"tenant": OTHER_TENANTS, "kind": "prompt"}
    assert registry.get_sample_value(name, {"tenant": "t0", "kind": "prompt"}) == 2
    assert registry.get_sample_value(name, last) == 1
    assert registry.get_sample_value(name, beyond) is None
    assert registry.get_sample_value(name, others) == 5


def test_tenants_do_not_see_each_other() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.accepted(Tenant("acme"), "m", 7)
    metrics.ended(None, Tenant("acme"))
    whole = generate_latest(registry).decode()
    shown = generate_latest(TenantBlind(registry)).decode()
    assert 'tenant="acme"' in whole and "acme" not in shown
    assert "baton_prompt_tokens_total 7.0" in shown


async def test_stages_add_up_to_the_requests(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4))
    for _ in range(3):
        await world.ask(REQUEST)
    await until(world.nothing_left)
    sums = [
        world.counted("baton_request_stage_seconds_sum", stage=stage)
        for stage in StageTimes().spent()
    ]
    assert world.counted("baton_request_stage_seconds_count", stage="decode") == 3
    assert 0 < sum(sums) < 60


async def test_opentelemetrys_names(world: World) -> None:
    """A name that a client made up is no label's value."""
    await world.start(RouterConfig(local_prefill_tokens=4))
    await world.ask(REQUEST)
    await world.ask(replace(REQUEST, max_tokens=1))
    with pytest.raises(ModelNotFound):
        await world.ask(replace(REQUEST, model="made up by a client"))
    await until(world.nothing_left)
    ran = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "baton",
        "gen_ai_request_model": "made-up",
        "gen_ai_response_model": "made-up",
    }
    prefix = "gen_ai_server"
    assert world.counted(f"{prefix}_request_duration_seconds_count", error_type="", **ran) == 2
    assert world.counted(f"{prefix}_time_to_first_token_seconds_count", **ran) == 2
    assert world.counted(f"{prefix}_time_per_output_token_seconds_count", **ran) == 1
    lost = {**ran, "gen_ai_request_model": "", "gen_ai_response_model": ""}
    failed = world.counted(
        f"{prefix}_request_duration_seconds_count", error_type="model_not_found", **lost
    )
    assert failed == 1
    assert "made up by a client" not in generate_latest(world.registry).decode()


async def test_vllms_names(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4))
    await world.ask(replace(REQUEST, n=2))
    with pytest.raises(ModelNotFound):
        await world.ask(replace(REQUEST, model="made up by a client"))
    await until(world.nothing_left)
    ran = {"model_name": "made-up"}
    counts = {
        name: world.counted(f"vllm:{name}", **ran)
        for name in (
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count",
            "request_time_per_output_token_seconds_count",
            "e2e_request_latency_seconds_count",
            "prompt_tokens_total",
            "generation_tokens_total",
        )
    }
    assert list(counts.values()) == [1, 2 * 39, 1, 1, len(PROMPT.encode()), 80]
    assert world.counted("vllm:request_success_total", finished_reason="length", **ran) == 2
    assert "made up by a client" not in generate_latest(world.registry).decode()
