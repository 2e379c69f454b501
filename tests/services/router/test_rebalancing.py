"""Sequences move from a decode worker with many to one with few, and no answer changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.errors import Overloaded
from batonlm.core.request.attempt import AttemptKey
from batonlm.core.request.request import TokenPrompt
from batonlm.core.routing import rebalance
from batonlm.core.routing.load import WorkerLoad
from batonlm.router.config import RouterConfig
from batonlm.router.request import migration
from batonlm.router.request.pipeline import EventStream
from batonlm.rpc.config import load
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDecode
from tests.services.router.conftest import Answer, World, until
from tests.services.router.disturbed import IDS, REQUEST, begin, finish

MOVING = RouterConfig(local_prefill_tokens=0)
TOKENS = 120
PAUSE = 30
"""No output goes on beyond this position until the moves are over, however slow the machine is."""
STEP_S = 0.02
BLOCK = 16
LONG = replace(REQUEST, max_tokens=TOKENS)
EXPECTED, _ = language.answer(IDS, 3, 0, TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router makes up its mind quickly."""
    monkeypatch.setattr(rebalance, "INTERVAL_S", 0.1)
    monkeypatch.setattr(rebalance, "PERSISTS_S", 0.1)
    monkeypatch.setattr(migration, "LOOK_AGAIN_S", 0.05)


def pause(worker: ScriptedDecode) -> None:
    worker.step_s, worker.last_position = STEP_S, PAUSE


def go_on(world: World) -> None:
    for decode in world.decodes:
        decode.step_s, decode.last_position = 0.001, None


def moves(world: World, outcome: str, reason: str = "load") -> float:
    return world.counted("baton_moves_total", reason=reason, outcome=outcome)


async def streams(world: World, number: int) -> list[tuple[EventStream, Answer]]:
    """So many streams under way on the only decode worker."""
    pause(world.decodes[0])
    return [await begin(world, LONG) for _ in range(number)]


async def another(world: World, worker: ScriptedDecode | None = None) -> ScriptedDecode:
    """A decode worker more."""
    added = worker or world.new_decode()
    pause(added)
    world.decodes.append(added)
    address = await added.start()
    world.listed["decode"].set((*world.addresses["decode"], address))
    return added


async def all_right(world: World, under_way: list[tuple[EventStream, Answer]]) -> None:
    go_on(world)
    for stream, answer in under_way:
        assert tuple((await finish(stream, answer)).token_ids[0]) == EXPECTED
    assert world.counted("baton_migrations_total") == world.counted("baton_retries_total") == 0
    assert len(world.prefills[0].runs) == len(under_way), "nothing is computed again"
    await until(world.nothing_left)


async def test_a_new_worker_gets_its_part(world: World) -> None:
    await world.start(MOVING)
    under_way = await streams(world, 6)
    added = await another(world)
    await until(lambda: moves(world, "moved") == 3)
    assert len(added.holds()) == len(world.decodes[0].holds()) == 3
    await all_right(world, under_way)
    assert moves(world, "moved") == 3
    assert len(world.decodes[0].wishes) == 3 and not added.wishes


async def test_nothing_moves_unless_it_is_asked_for(world: World) -> None:
    await world.start(replace(MOVING, rebalance_moves=0))
    under_way = await streams(world, 6)
    added = await another(world)
    await until(lambda: world.met()["decode"] == 2)
    # Others would have begun long before.
    await asyncio.sleep(0.5)
    await all_right(world, under_way)
    assert not world.decodes[0].wishes and not added.starts


@pytest.mark.parametrize("ends", ["refuses", "dies"])
async def test_what_the_new_worker_does_not_take_goes_on_where_it_was(
    world: World, ends: str
) -> None:
    await world.start(MOVING)
    under_way = await streams(world, 6)
    added = world.new_decode()
    if ends == "refuses":
        added.refusals += [Overloaded("full")] * 100
    added.collecting.clear()
    await another(world, added)
    await until(lambda: bool(added.starts))
    if ends == "dies":
        await added.kill()
    window = world.pipeline.gate.dispatcher.window.limit
    await until(lambda: moves(world, "returned") == 1)
    assert world.pipeline.gate.dispatcher.window.limit >= window, "it was no admission"
    await all_right(world, under_way)
    assert moves(world, "moved") == moves(world, "failed") == 0
    assert len(world.decodes[0].taken_back) == moves(world, "returned")


async def test_a_client_leaves_while_its_sequence_moves(world: World) -> None:
    await world.start(MOVING)
    under_way = await streams(world, 6)
    added = world.new_decode()
    added.collecting.clear()
    await another(world, added)
    await until(lambda: bool(added.starts))
    for stream, _ in under_way:
        await stream.aclose()
    await until(world.nothing_left)
    assert moves(world, "dropped") == 1


class Reporting(ScriptedDecode):
    """Reports what it runs."""

    def load(self) -> WorkerLoad:
        return replace(super().load(), running_sequences=len(self.holds()))


async def test_a_worker_whose_memory_runs_out_gives_to_another(world: World) -> None:
    world.decodes.append(Reporting(world.network))
    await world.start(MOVING, decodes=0)
    full = world.decodes[0]
    under_way = await streams(world, 3)
    full.free_blocks = 2
    added = await another(world)
    await until(lambda: moves(world, "moved", "memory") == 1)
    full.free_blocks = 500
    await all_right(world, under_way)
    assert moves(world, "moved") == 0
    assert moves(world, "moved", "memory") == len(added.starts)


class Counting(Reporting):
    """Has blocks for the inputs of what it runs."""

    def load(self) -> WorkerLoad:
        running = [self.running[AttemptKey(key.request_id, key.attempt)] for key in self.holds()]
        taken = sum(-(-len(one.attempt.token_ids) // BLOCK) for one in running)
        return replace(super().load(), free_blocks=self.num_blocks - taken)


async def test_a_request_that_fits_nowhere_gets_the_room_of_one_that_moves(world: World) -> None:
    """Each of two workers has 60 of 120 blocks free, and the request needs 75."""
    for _ in range(2):
        worker = Counting(world.network)
        worker.num_blocks = 120
        pause(worker)
        world.decodes.append(worker)
    await world.start(MOVING, decodes=0)
    prompts = [(9 + number,) * 480 for number in range(4)]
    under_way = [await begin(world, replace(LONG, prompt=TokenPrompt(ids))) for ids in prompts]
    assert [len(decode.holds()) for decode in world.decodes] == [2, 2]

    fleet = world.fleet
    assert fleet is not None

    def known() -> bool:
        loads = [worker.load for worker in fleet.decodes.workers()]
        return [load.free_blocks for load in loads if load is not None] == [60, 60]

    await until(known)
    long = (9,) * 1200
    urgent = replace(REQUEST, prompt=TokenPrompt(long), max_tokens=20, priority=-1)
    expected, _ = language.answer(long, 3, 0, 20, ignore_eos=True)
    assert tuple((await world.ask(urgent)).token_ids[0]) == expected
    assert moves(world, "moved", "room") == 1
    assert sum(len(decode.starts) for decode in world.decodes) == len(prompts) + 2
    go_on(world)
    for (stream, answer), ids in zip(under_way, prompts, strict=True):
        expected, _ = language.answer(ids, 3, 0, TOKENS, ignore_eos=True)
        assert tuple((await finish(stream, answer)).token_ids[0]) == expected
    assert world.counted("baton_retries_total") == 0
    await until(world.nothing_left)


@pytest.mark.parametrize("wrong", [("--rebalance-margin", "0"), ("--rebalance-moves", "-1")])
def test_settings_that_make_no_sense(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(RouterConfig, wrong, {}, prog="baton-router")
    assert f"from {wrong[0]}) is not allowed" in capsys.readouterr().err
