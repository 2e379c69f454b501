"""What a router's requests share: retries, breakers and quarantine, over scripted workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import Internal, Unavailable
from batonlm.core.routing import failures as breaker
from batonlm.core.routing.failures import BreakerState
from batonlm.router.config import RouterConfig
from batonlm.router.request import pipeline
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import REQUEST, begin_and_pause, check, finish

MANY_ATTEMPTS = RouterConfig(local_prefill_tokens=0, max_attempts=10)


@pytest.fixture
def one_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of one retry that never grows."""
    monkeypatch.setattr(pipeline, "RETRY_SHARE", 0.0)
    monkeypatch.setattr(pipeline, "RETRY_BURST", 1)
    monkeypatch.setattr(pipeline, "RETRIES_PER_S", 0.0)


async def test_a_request_that_has_not_begun_is_not_retried_beyond_the_budget(
    world: World, one_retry: None
) -> None:
    await world.start(MANY_ATTEMPTS, prefills=0)
    world.decodes[0].refusals = [Internal("broken")] * 5
    with pytest.raises(Unavailable) as refused:
        await world.ask(REQUEST)
    assert refused.value.retry_after_s is not None
    assert len(world.decodes[0].starts) == 2
    await until(world.nothing_left)


async def test_a_stream_that_has_begun_asks_no_budget(world: World, one_retry: None) -> None:
    await world.start(MANY_ATTEMPTS, prefills=0, decodes=3)
    world.pipeline.services.budget.take(0.0)
    stream, answer, victim = await begin_and_pause(world, REQUEST, 12)
    await victim.kill()
    check(await finish(stream, answer))


@pytest.mark.deep
async def test_a_worker_that_loses_everything_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "OPEN_S", 3600.0)
    monkeypatch.setattr(breaker, "LONGEST_OPEN_S", 3600.0)
    await world.start(prefills=0, decodes=2)
    assert world.fleet is not None
    bad = world.decodes[0]
    bad.refusals = [Internal("broken")] * 1000
    found = world.fleet.decodes.get(bad.identity.instance_id)
    assert found is not None
    while found.breaker.state is BreakerState.CLOSED:
        check(await world.ask(REQUEST))
    tried = len(bad.starts)
    for seed in range(8):
        await world.ask(replace(REQUEST, seed=seed, max_tokens=5))
    assert len(bad.starts) == tried


@pytest.mark.deep
async def test_the_last_worker_is_used_whatever_it_loses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "OPEN_S", 3600.0)
    await world.start(RouterConfig(max_attempts=10), prefills=0)
    world.decodes[0].refusals = [Internal("broken")] * 5
    check(await world.ask(REQUEST))
