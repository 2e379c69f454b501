"""A decode worker drains: its sequences go on elsewhere with their KV, and no answer changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import Overloaded
from batonlm.core.request.request import Request
from batonlm.core.routing.load import WorkerState
from batonlm.router.request.migration import AT_ONCE
from batonlm.router.request.pipeline import EventStream
from batonlm.router.request.runner import MAX_UNCONFIRMED
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDecode
from tests.services.router.conftest import Answer, World, until
from tests.services.router.disturbed import (
    EXPECTED,
    IDS,
    REQUEST,
    STEP_S,
    TEXT,
    begin,
    begin_to_move,
    check,
    drain,
    finish,
)


async def started(
    world: World, request: Request = REQUEST, *, decodes: int = 2
) -> tuple[EventStream, Answer, ScriptedDecode]:
    """A stream under way, and the worker it decodes on."""
    await world.start(decodes=decodes)
    return await begin_to_move(world, request)


def other(world: World, one: ScriptedDecode) -> ScriptedDecode:
    return next(decode for decode in world.decodes if decode is not one)


def moves(world: World, outcome: str) -> float:
    return world.counted("baton_moves_total", reason="drain", outcome=outcome)


@pytest.mark.deep
@pytest.mark.parametrize("n", [1, 4])
async def test_kv_moves_and_nothing_is_computed_again(world: World, n: int) -> None:
    stream, answer, leaving = await started(world, replace(REQUEST, n=n))
    await drain(world, leaving, n)
    check(await finish(stream, answer), n)
    replacement = other(world, leaving)
    assert moves(world, "moved") == n
    assert {wish.choice for wish in leaving.wishes} == set(range(n))
    assert len(world.prefills[0].runs) == 1
    assert world.counted("baton_migrations_total") == 0
    assert world.counted("baton_local_prefill_total") == 0
    moved = [start for start in replacement.starts if start.attempt > 0]
    assert sorted(start.choices for start in moved) == [(choice,) for choice in range(n)]
    for start in moved:
        output, _ = language.answer(IDS, 3, start.choices[0], 120, ignore_eos=True)
        assert start.token_ids == (*IDS, *output[: start.position]), "without the newest token"
    await until(world.nothing_left)
    assert not leaving.cancels, "it frees a sequence by itself when that was collected"


async def test_stop_strings_and_logprobs_move_too(world: World) -> None:
    stop = TEXT[60:64]
    sampling = replace(REQUEST.sampling, top_logprobs=2)
    request = replace(REQUEST, stop_strings=(stop,), sampling=sampling)
    stream, answer, leaving = await started(world, request)
    await drain(world, leaving)
    await finish(stream, answer)
    found = language.stopped(EXPECTED, stop)
    assert found is not None
    assert (tuple(answer.token_ids[0]), answer.texts[0]) == found
    assert moves(world, "moved") == 1
    said = [entry.token.logprob for delta in answer.deltas for entry in delta.logprobs]
    assert said == [language.logprob(token) for token in found[0]]
    assert max(decode.furthest_ahead for decode in world.decodes) <= MAX_UNCONFIRMED
    await until(world.nothing_left)


async def test_with_nobody_to_go_to_it_finishes_where_it_is(world: World) -> None:
    stream, answer, leaving = await started(world, decodes=1)
    await drain(world, leaving, 0)
    check(await finish(stream, answer))
    assert not leaving.wishes


async def test_a_worker_whose_kv_differs_is_nobody_to_go_to(world: World) -> None:
    world.decodes.append(
        ScriptedDecode(world.network, layout=replace(language.LAYOUT, num_layers=3))
    )
    world.decodes[0].state = WorkerState.DRAINING
    stream, answer, leaving = await started(world, decodes=1)
    assert leaving is not world.decodes[0]
    world.decodes[0].state = WorkerState.SERVING
    await drain(world, leaving, 0)
    check(await finish(stream, answer))
    assert not leaving.wishes and not world.decodes[0].starts


@pytest.mark.deep
async def test_what_cannot_go_now_is_asked_for_again(world: World) -> None:
    stream, answer, leaving = await started(world)
    leaving.keeping = True
    leaving.state = WorkerState.DRAINING
    await until(lambda: moves(world, "stayed") == 1)
    leaving.keeping = False
    await drain(world, leaving, len(leaving.wishes) + 1)
    check(await finish(stream, answer))
    assert moves(world, "moved") == 1


@pytest.mark.deep
async def test_a_few_move_at_a_time(world: World) -> None:
    await world.start(decodes=2)
    for decode in world.decodes:
        decode.step_s = STEP_S
    many = [await begin(world, replace(REQUEST, max_tokens=1000)) for _ in range(16)]
    leaving = max(world.decodes, key=lambda decode: len(decode.holds()))
    replacement = other(world, leaving)
    there = len(leaving.holds())
    assert there > AT_ONCE
    replacement.collecting.clear()
    leaving.state = WorkerState.DRAINING
    await until(lambda: len(leaving.giving) == AT_ONCE)
    made = sum(len(r.outputs[0]) for r in leaving.running.values())
    await until(lambda: sum(len(r.outputs[0]) for r in leaving.running.values()) > made + 50)
    assert len(leaving.wishes) == AT_ONCE, "the others go on where they are"
    replacement.collecting.set()
    await until(lambda: moves(world, "moved") == there)
    for decode in world.decodes:
        decode.step_s = 0.0
    expected, _ = language.answer(IDS, 3, 0, 1000, ignore_eos=True)
    for stream, answer in many:
        assert tuple((await finish(stream, answer)).token_ids[0]) == expected
    assert moves(world, "moved") == there
    await until(world.nothing_left)


@pytest.mark.deep
@pytest.mark.parametrize("victim", ["sender", "receiver"])
async def test_either_end_dies_on_the_way(world: World, victim: str) -> None:
    stream, answer, leaving = await started(world, decodes=3)
    for decode in world.decodes:
        decode.collecting.clear()
    await drain(world, leaving)
    others = [decode for decode in world.decodes if decode is not leaving]
    await until(lambda: any(decode.running for decode in others))
    replacement = next(decode for decode in others if decode.running)
    await (leaving if victim == "sender" else replacement).kill()
    for decode in world.decodes:
        decode.collecting.set()
    check(await finish(stream, answer))
    computed = 1 if victim == "sender" else 0
    assert moves(world, "failed") == computed
    assert moves(world, "returned") == 1 - computed
    assert world.counted("baton_migrations_total") == computed
    await until(world.nothing_left)


@pytest.mark.parametrize("n", [1, 3])
async def test_what_a_full_worker_refuses_goes_on_where_it_was(world: World, n: int) -> None:
    stream, answer, leaving = await started(world, replace(REQUEST, n=n))
    full = other(world, leaving)
    full.refusals += [Overloaded("full")] * n
    await drain(world, leaving, n)
    check(await finish(stream, answer), n)
    assert moves(world, "returned") == n and not full.refusals
    assert [back.choices for back in leaving.taken_back] == [start.choices for start in full.starts]
    assert world.counted("baton_migrations_total") == world.counted("baton_retries_total") == 0
    assert len(world.prefills[0].runs) == 1, "nothing is computed again"
    await until(world.nothing_left)


async def test_what_comes_back_keeps_its_stop_strings_and_logprobs(world: World) -> None:
    stop = TEXT[60:64]
    sampling = replace(REQUEST.sampling, top_logprobs=2)
    request = replace(REQUEST, stop_strings=(stop,), sampling=sampling)
    stream, answer, leaving = await started(world, request)
    other(world, leaving).refusals += [Overloaded("full")]
    await drain(world, leaving)
    await finish(stream, answer)
    assert (tuple(answer.token_ids[0]), answer.texts[0]) == language.stopped(EXPECTED, stop)
    assert moves(world, "returned") == 1
    said = [entry.token.logprob for delta in answer.deltas for entry in delta.logprobs]
    assert said == [language.logprob(token) for token in answer.token_ids[0]]
    await until(world.nothing_left)


async def test_a_client_that_leaves_on_the_way_frees_both_ends(world: World) -> None:
    stream, _, leaving = await started(world)
    replacement = other(world, leaving)
    replacement.collecting.clear()
    await drain(world, leaving)
    await until(lambda: bool(replacement.running))
    await stream.aclose()
    await until(world.nothing_left)
    assert moves(world, "dropped") == 1


@pytest.mark.deep
@pytest.mark.parametrize("stop", [(), (TEXT[90:94],)])
async def test_texts_leave_a_detokenizer_that_drains(world: World, stop: tuple[str, ...]) -> None:
    await world.start(detokenizers=2)
    stream, answer, decode = await begin_to_move(world, replace(REQUEST, stop_strings=stop))
    leaving = next(worker for worker in world.detokenizers if worker.texts)
    leaving.state = WorkerState.DRAINING
    (replacement,) = (worker for worker in world.detokenizers if worker is not leaving)
    await until(lambda: bool(replacement.texts) and not leaving.texts)
    decode.last_position = None
    answer = await finish(stream, answer)
    if stop:
        kept, text = language.stopped(EXPECTED, stop[0]) or ((), "")
        assert (tuple(answer.token_ids[0]), answer.texts[0]) == (kept, text)
    else:
        check(answer)


async def test_texts_stay_where_no_other_detokenizer_can_have_them(world: World) -> None:
    await world.start()
    world.decodes[0].step_s = STEP_S
    stream, answer = await begin(world, REQUEST, 5)
    world.detokenizers[0].state = WorkerState.DRAINING
    check(await finish(stream, answer))
    assert len(world.detokenizers[0].openings) == 1
