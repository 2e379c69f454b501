"""GET /requests/{id} of a router with workers on real sockets, held against what was done to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import TenantLimits
from batonlm.core.admission.tenants import Tenant
from batonlm.core.routing.load import WorkerState
from batonlm.router.api.access import Authenticator, OpenAuthenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.answer_schema import Explained
from batonlm.router.api.http.app import HttpApp
from batonlm.router.api.http.server import serve_http
from batonlm.router.config import RouterConfig
from batonlm.router.observe import records
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import (
    PROMPT,
    REQUEST,
    STEP_S,
    begin_and_pause,
    begin_to_move,
    check,
    drain,
    finish,
)
from tests.services.router.test_keys import Kept

SPLIT = RouterConfig(local_prefill_tokens=0, prefills=("prefill:1",))


@asynccontextmanager
async def http_of(
    world: World, authenticator: Authenticator | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    http_access = HttpAccess(authenticator or OpenAuthenticator())
    app = HttpApp(world.pipeline, CollectorRegistry(), http_access)
    server = await serve_http(app, "127.0.0.1:0")
    base = f"http://{server.address}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
            yield client
    finally:
        await server.close()


async def explained(http: httpx.AsyncClient, request_id: str) -> Explained:
    response = await http.get(f"/requests/{request_id}")
    assert response.status_code == 200, response.text
    assert PROMPT not in response.text
    return msgspec.json.decode(response.content, type=Explained)


async def test_one_that_ran_apart(world: World) -> None:
    await world.start(SPLIT, decodes=2)
    answer = await world.ask(REQUEST)
    check(answer)
    async with http_of(world) as http:
        told = await explained(http, answer.accepted.request_id)
    assert (told.state, told.stage, told.error) == ("finished", None, None)
    assert told.prompt_tokens == len(PROMPT) and told.asked == "text"
    assert told.choices is not None
    assert [(c.output_tokens, c.finish_reason) for c in told.choices] == [(120, "length")]
    assert told.split.configured and told.split.used
    assert sum(told.stages.values()) == pytest.approx(told.total_s, abs=1e-4)
    (attempt,) = told.attempts
    assert attempt.state == "ended" and not attempt.losses
    assert attempt.prefill is not None and attempt.decode is not None
    assert attempt.prefill.address == world.prefills[0].identity.address
    assert attempt.kv_bytes == told.kv_bytes > 0
    assert attempt.kv_s is not None and attempt.kv_s > 0
    assert (attempt.prefill_cached_tokens, attempt.decode_cached_tokens) == (1, 2)
    fates = {(c.worker.role, c.filter_reason) for c in attempt.candidates}
    assert fates == {("decode", "picked"), ("decode", "outscored"), ("prefill", "picked")}
    assert all(c.cost and c.cost["total"] >= 0 for c in attempt.candidates)


async def test_a_prefill_pool_that_is_never_used_says_why(world: World) -> None:
    await world.start(SPLIT, prefills=0)
    answer = await world.ask(REQUEST)
    async with http_of(world) as http:
        told = await explained(http, answer.accepted.request_id)
    assert told.split.configured and not told.split.used
    assert told.split.why is not None and "knows no live worker of it" in told.split.why


async def test_a_prefill_pool_that_is_not_ready_says_why(world: World) -> None:
    world.prefills.append(world.new_prefill())
    world.prefills[0].state = WorkerState.STARTING
    await world.start(SPLIT, prefills=0)
    answer = await world.ask(REQUEST)
    async with http_of(world) as http:
        told = await explained(http, answer.accepted.request_id)
    assert not told.split.used
    assert told.split.why is not None and "1 worker: not serving, starting" in told.split.why


async def test_a_death_is_told_with_the_attempt_that_went_on(world: World) -> None:
    await world.start(SPLIT, decodes=2)
    stream, answer, victim = await begin_and_pause(world, REQUEST, 5)
    async with http_of(world) as http:
        running = await explained(http, answer.accepted.request_id)
        assert (running.state, running.stage) == ("running", "decode")
        assert running.choices is None and running.first_token_s is not None
        await victim.kill()
        check(await finish(stream, answer))
        told = await explained(http, answer.accepted.request_id)
    first, second = told.attempts
    assert first.state == "failed" and first.losses[0].phase == "decode"
    assert first.decode is not None and first.decode.address == victim.identity.address
    assert second.state == "ended" and second.position >= 5
    assert {c.filter_reason for c in second.candidates} >= {"picked"}
    assert told.num_attempts == 2


async def test_a_move_is_told(world: World) -> None:
    await world.start(SPLIT, decodes=2)
    stream, answer, leaving = await begin_to_move(world, REQUEST)
    await drain(world, leaving)
    check(await finish(stream, answer))
    async with http_of(world) as http:
        told = await explained(http, answer.accepted.request_id)
    assert told.moves == 1
    assert [attempt.moved for attempt in told.attempts] == [False, True]
    assert [attempt.state for attempt in told.attempts] == ["ended", "ended"]
    assert told.split.used


async def test_a_failed_one_is_found_by_the_id_of_its_refusal(world: World) -> None:
    await world.start(SPLIT)
    async with http_of(world) as http:
        body = {"model": "other", "prompt": "x"}
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 404
        told = await explained(http, refused.headers["x-request-id"])
    assert told.state == "failed" and told.error is not None
    assert told.error.code == "model_not_found"
    assert told.attempts == [] and told.split.why is None


async def test_one_that_lost_its_last_worker_is_found_too(world: World) -> None:
    world.decodes.append(world.new_decode())
    world.decodes[0].step_s = STEP_S
    await world.start(replace(SPLIT, wait_timeout_s=0.1), decodes=0)
    async with http_of(world) as http:
        body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: bool(world.decodes[0].holds()))
        await world.decodes[0].kill()
        refused = await asking
        assert refused.status_code == 503
        told = await explained(http, refused.headers["x-request-id"])
    assert told.state == "failed" and told.error is not None
    assert told.error.code == "unavailable"
    assert told.attempts[0].state == "failed"
    assert told.attempts[0].losses[0].phase == "decode"


async def test_the_id_of_an_answer_will_do(world: World) -> None:
    await world.start(SPLIT)
    async with http_of(world) as http:
        body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        await until(world.nothing_left)
        told = await explained(http, answer["id"])
        assert answer["id"].endswith(told.id) and not told.replayable


async def test_a_client_that_left(world: World) -> None:
    await world.start(SPLIT)
    stream, answer, _ = await begin_and_pause(world, REQUEST, 5)
    await stream.aclose()
    await until(world.nothing_left)
    async with http_of(world) as http:
        told = await explained(http, answer.accepted.request_id)
    assert told.state == "failed" and told.error is not None
    assert told.error.code == "cancelled"


async def test_only_its_own_tenant_may_ask(world: World, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "keys.json")
    one, other = kept.new("one", TenantLimits()), kept.new("other", TenantLimits())
    authenticator = kept.authenticator()
    await world.start(SPLIT)
    answer = await world.ask(REQUEST.of(Tenant("one")))
    path = f"/requests/{answer.accepted.request_id}"
    async with http_of(world, authenticator) as http:
        assert (await http.get(path)).status_code == 401
        theirs = await http.get(path, headers={"authorization": f"Bearer {other}"})
        never = await http.get("/requests/abc", headers={"authorization": f"Bearer {other}"})
        assert theirs.status_code == never.status_code == 404
        assert theirs.json() == never.json()
        assert theirs.json()["error"]["code"] == "not_found"
        mine = await http.get(path, headers={"authorization": f"Bearer {one}"})
        assert mine.status_code == 200


async def test_a_tenant_sees_what_became_of_its_request_and_nothing_of_others(
    world: World, tmp_path: Path
) -> None:
    """A worker dies on the way, so that there is a loss to tell, too."""
    kept = Kept(tmp_path / "keys.json")
    mine = {"authorization": f"Bearer {kept.new('one')}"}
    await world.start(SPLIT, decodes=2)
    stream, answer, victim = await begin_and_pause(world, REQUEST.of(Tenant("one")), 5)
    await victim.kill()
    check(await finish(stream, answer))
    async with http_of(world, kept.authenticator()) as http:
        response = await http.get(f"/requests/{answer.accepted.request_id}", headers=mine)
        body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
        headers = mine | {"x-baton-timings": "true"}
        timed = await http.post("/v1/completions", json=body, headers=headers)
    assert "127.0.0.1" not in response.text and "127.0.0.1" not in timed.text
    told = msgspec.json.decode(response.content, type=Explained)
    assert sum(told.stages.values()) == pytest.approx(told.total_s, abs=1e-4)
    instance_ids = {worker.identity.short for worker in (*world.prefills, *world.decodes)}
    assert instance_ids >= {
        worker.instance_id for worker in told.workers if worker.role in ("prefill", "decode")
    }
    first, second = told.attempts
    for attempt in told.attempts:
        assert attempt.candidates == [] and attempt.others == 0
        assert attempt.predicted_first_token_s is attempt.local_s is attempt.remote_s is None
        assert attempt.prefill is not None and attempt.prefill.instance_id in instance_ids
        assert attempt.why == told.split.why == "Prefill and decode ran apart."
    assert [(loss.phase, loss.code) for loss in first.losses] == [("decode", "unavailable")]
    assert "worker" not in first.losses[0].message
    assert second.prefill_s is not None and second.kv_bytes > 0
    assert {worker["role"] for worker in timed.json()["baton"][0]["workers"]} >= {"decode"}
    answered = await world.ask(replace(REQUEST, max_tokens=2).of(Tenant("one")))
    assert answered.finished is not None and answered.finished.stages is not None
    assert {worker.address for worker in answered.finished.stages.workers} == {""}


async def test_an_operator_sees_all_of_every_tenants(world: World, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "keys.json")
    staff = {"authorization": f"Bearer {kept.new('staff', operator=True)}"}
    await world.start(replace(SPLIT, keep_replays=True), decodes=2)
    answer = await world.ask(REQUEST.of(Tenant("one")))
    path = f"/requests/{answer.accepted.request_id}"
    async with http_of(world, kept.authenticator()) as http:
        response = await http.get(path, headers=staff)
        replay = await http.get(f"{path}?replay", headers=staff)
        timed = await http.post(
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 2, "ignore_eos": True},
            headers=staff | {"x-baton-timings": "true"},
        )
    told = msgspec.json.decode(response.content, type=Explained)
    (attempt,) = told.attempts
    assert attempt.prefill is not None
    assert attempt.prefill.address == world.prefills[0].identity.address
    assert all(each.cost and each.worker.address for each in attempt.candidates)
    assert len(attempt.candidates) == 3 and "--prefer-split" in attempt.why
    assert len(replay.json()["prompt_token_ids"]) == told.prompt_tokens
    addresses = {worker["address"] for worker in timed.json()["baton"][0]["workers"]}
    assert world.prefills[0].identity.address in addresses


async def test_without_keys_only_this_machine_sees_where_workers_are(world: World) -> None:
    await world.start(SPLIT)
    for beyond in (False, True):
        async with http_of(world, OpenAuthenticator(public=beyond)) as http:
            body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
            answer = await http.post(
                "/v1/completions", json=body, headers={"x-baton-timings": "true"}
            )
            await until(world.nothing_left)
            told = await explained(http, answer.json()["id"])
        said = [worker.address for worker in told.workers]
        said += [worker["address"] for worker in answer.json()["baton"][0]["workers"]]
        assert all(said) != beyond
        assert bool(told.attempts[0].candidates) != beyond


async def test_nothing_is_remembered_without_timings(world: World) -> None:
    await world.start(replace(SPLIT, timings=False))
    answer = await world.ask(REQUEST)
    async with http_of(world) as http:
        response = await http.get(f"/requests/{answer.accepted.request_id}")
    assert response.status_code == 404
    assert len(world.pipeline.records.history) == 0


async def test_many_at_once_stay_in_the_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_HISTORY", 3)
    await world.start(SPLIT)
    short = replace(REQUEST, max_tokens=2)
    await asyncio.gather(*(world.ask(short) for _ in range(9)))
    await until(world.nothing_left)
    assert len(world.pipeline.records.history) == 3
