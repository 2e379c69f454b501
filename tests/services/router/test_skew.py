"""Two versions at once, as in a rolling upgrade: what does not fit is kept apart.

Real processes of two wire versions are in `tests/e2e/test_skew.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.errors import Unavailable
from batonlm.core.routing.load import WorkerState
from batonlm.router.config import RouterConfig
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDetokenizer, ScriptedTokenizer
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import (
    EXPECTED,
    REQUEST,
    begin_and_pause,
    check,
    finish,
)

NEW_WIRE = replace(language.LAYOUT, min_wire_version=2, max_wire_version=2)
NEW_MODEL = replace(language.MODEL, digest="another", tokenizer_digest="another")


async def test_two_wire_versions_are_never_paired(world: World) -> None:
    world.prefills += [world.new_prefill(), world.new_prefill()]
    world.decodes += [world.new_decode(), world.new_decode()]
    world.prefills[1].layout = world.decodes[1].layout = NEW_WIRE
    world.tokenizers.append(ScriptedTokenizer())
    world.detokenizers.append(ScriptedDetokenizer())
    await world.run(RouterConfig(local_prefill_tokens=0))
    answers = await asyncio.gather(*(world.ask(REQUEST) for _ in range(16)))
    assert all(tuple(answer.token_ids[0]) == EXPECTED for answer in answers)
    assert world.counted("baton_local_prefill_total") == 0
    for prefill, decode in zip(world.prefills, world.decodes, strict=True):
        assert len(prefill.runs) == len(decode.starts) > 0


@pytest.mark.parametrize("upgraded", ["prefill", "decode"])
async def test_without_a_prefill_worker_that_fits_decode_prefills(
    world: World, upgraded: str
) -> None:
    world.prefills.append(world.new_prefill())
    world.decodes.append(world.new_decode())
    new = world.prefills if upgraded == "prefill" else world.decodes
    new[0].layout = NEW_WIRE
    world.tokenizers.append(ScriptedTokenizer())
    world.detokenizers.append(ScriptedDetokenizer())
    await world.run(RouterConfig(local_prefill_tokens=0))
    check(await world.ask(REQUEST))
    assert not world.prefills[0].runs
    assert world.counted("baton_local_prefill_total") == 1


async def test_a_stream_is_computed_again_where_its_kv_does_not_fit(world: World) -> None:
    """It stays on the worker that drains for as long as that lives."""
    await world.start(decodes=2)
    stream, answer, leaving = await begin_and_pause(world, REQUEST, 5)
    replacement = next(decode for decode in world.decodes if decode is not leaving)
    assert world.fleet is not None
    await replacement.kill()
    await until(lambda: world.met()["decode"] == 1)
    replacement = world.new_decode()
    replacement.layout = NEW_WIRE
    world.decodes.append(replacement)
    world.listed["decode"].set((*world.addresses["decode"], await replacement.start()))
    await until(lambda: world.met()["decode"] == 2)
    leaving.state = WorkerState.DRAINING
    fleet = world.fleet
    await until(
        lambda: any(s.load.state is WorkerState.DRAINING for s in fleet.decodes.snapshots())
    )
    await leaving.kill()
    check(await finish(stream, answer))
    assert world.counted("baton_moves_total", reason="drain", outcome="moved") == 0
    assert world.counted("baton_migrations_total") == 1


@pytest.mark.deep
async def test_new_requests_go_to_the_model_that_can_be_served(world: World) -> None:
    """Another model under the same name: the old decode worker drains, its texts are gone."""
    world.tokenizers.append(ScriptedTokenizer(model=NEW_MODEL))
    world.detokenizers.append(ScriptedDetokenizer(model=NEW_MODEL))
    world.decodes += [world.new_decode() for _ in range(3)]
    world.decodes[1].model = NEW_MODEL
    world.decodes[2].state = WorkerState.DRAINING
    await world.run(RouterConfig(local_prefill_tokens=0))
    for _ in range(8):
        check(await world.ask(REQUEST))
    assert [len(decode.starts) for decode in world.decodes] == [0, 8, 0]


async def test_a_request_without_a_token_goes_to_the_version_that_stays(world: World) -> None:
    """It waits for its model, whose only decode worker drains, when another version comes."""
    await world.start(prefills=0)
    fleet = world.fleet
    assert fleet is not None
    world.decodes[0].state = WorkerState.DRAINING
    await until(
        lambda: any(s.load.state is WorkerState.DRAINING for s in fleet.decodes.snapshots())
    )
    asking = asyncio.create_task(world.ask(REQUEST))
    await until(lambda: len(world.tokenizers[0].remaining_s) == 1)
    replacement = world.new_decode()
    replacement.model = replace(language.MODEL, digest="another")
    world.decodes.append(replacement)
    world.listed["decode"].set((*world.addresses["decode"], await replacement.start()))
    check(await asking)
    assert replacement.starts


async def test_a_started_stream_never_goes_on_with_another_model(world: World) -> None:
    config = RouterConfig(local_prefill_tokens=0, wait_timeout_s=0.3)
    await world.start(config, decodes=2, prefills=0)
    stream, answer, old = await begin_and_pause(world, REQUEST, 5)
    other = next(decode for decode in world.decodes if decode is not old)
    await other.kill()
    await until(lambda: world.met()["decode"] == 1)
    new = world.new_decode()
    new.model = NEW_MODEL
    world.decodes.append(new)
    world.listed["decode"].set((*world.addresses["decode"], await new.start()))
    await until(lambda: world.met()["decode"] == 2)
    await old.kill()
    with pytest.raises(Unavailable) as ended:
        await finish(stream, answer)
    assert ended.value.retry_after_s
    assert not new.starts
