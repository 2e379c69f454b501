"""Workers die, hang, refuse and break their word; the client reads the same answer all the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.errors import (
    Internal,
    Overloaded,
    Unavailable,
)
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.core.request.request import SamplingParams
from batonlm.router.config import RouterConfig
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDetokenizer
from tests.services.router.conftest import PATIENCE_S, Answer, World, read, until
from tests.services.router.disturbed import (
    EXPECTED,
    IDS,
    REQUEST,
    TEXT,
    begin,
    begin_and_pause,
    busy,
    check,
    finish,
)


@pytest.mark.deep
@pytest.mark.parametrize("n", [1, 4])
async def test_decode_dies_in_the_middle(world: World, n: int) -> None:
    await world.start(decodes=2)
    stream, answer, victim = await begin_and_pause(world, replace(REQUEST, n=n), 12)
    await victim.kill()
    check(await finish(stream, answer), n)
    starts = [start for decode in world.decodes for start in decode.starts]
    assert {start.attempt for start in starts} >= {0, 1}
    again = [start for start in starts if start.attempt > 0]
    assert all(start.position > 0 for start in again), (
        "accepted tokens are input, not sampled again"
    )
    await until(world.nothing_left)


async def test_choices_that_ended_do_not_move(world: World) -> None:
    await world.start(decodes=2)
    lengths = [len(language.answer(IDS, 11, c, 120)[0]) for c in range(4)]
    first, last = min(lengths), max(lengths)
    assert first + 5 < last
    for decode in world.decodes:
        decode.last_position = first
    stream, answer = await begin(world, replace(REQUEST, seed=11, n=4, ignore_eos=False), 1)
    victim = busy(world)
    async with asyncio.timeout(PATIENCE_S):
        while not answer.last:
            answer.add(await anext(stream))  # type: ignore[arg-type]
    ended = set(answer.last)
    await victim.kill()
    for decode in world.decodes:
        decode.last_position = None
    await finish(stream, answer)
    for choice in range(4):
        expected, reason = language.answer(IDS, 11, choice, 120)
        assert tuple(answer.token_ids[choice]) == expected
        assert answer.reason(choice) is reason
    moved = [start for decode in world.decodes for start in decode.starts if start.attempt > 0]
    assert moved
    assert not ended & {choice for start in moved for choice in start.choices}


async def test_the_only_decode_worker_dies_and_comes_back_as_another(world: World) -> None:
    await world.start()
    stream, answer, victim = await begin_and_pause(world, REQUEST)
    address = world.addresses["decode"][0]
    await victim.kill()
    replacement = world.new_decode()
    world.decodes.append(replacement)
    await replacement.start(address)
    check(await finish(stream, answer))
    assert replacement.starts


async def test_a_broken_session_is_resumed(world: World) -> None:
    """The worker lives: nothing is run again."""
    await world.start()
    stream, answer, decode = await begin_and_pause(world, replace(REQUEST, n=2))
    decode.break_stream.set()
    decode.last_position = None
    check(await finish(stream, answer), 2)
    assert [start.attempt for start in world.decodes[0].starts] == [0]
    assert len(world.decodes[0].hellos) == 2
    assert {entry.choice for entry in world.decodes[0].hellos[1].resume} == {0, 1}


async def test_a_resumed_session_that_lost_a_sequence_runs_it_again(world: World) -> None:
    await world.start()
    stream, answer, decode = await begin_and_pause(world, REQUEST)
    decode.running.clear()
    decode.break_stream.set()
    decode.last_position = None
    check(await finish(stream, answer))
    assert [start.attempt for start in world.decodes[0].starts] == [0, 1]


@pytest.mark.deep
async def test_a_silent_decode_worker_is_dead(world: World) -> None:
    await world.start(decodes=2)
    stream, answer, victim = await begin_and_pause(world, REQUEST)
    victim.silent = True
    check(await finish(stream, answer))
    assert any(d.starts and d is not victim for d in world.decodes)


async def test_tokens_that_are_missing_end_the_attempt(world: World) -> None:
    await world.start()
    dropped: list[ChoiceTokens] = []

    def drop_one(tokens: list[ChoiceTokens]) -> list[ChoiceTokens]:
        if not dropped and tokens and tokens[0].position >= 10:
            dropped.append(tokens[0])
            return tokens[1:]
        return tokens

    world.decodes[0].tamper = drop_one
    check(await world.ask(REQUEST))
    assert len(dropped) == 1
    assert [start.attempt for start in world.decodes[0].starts] == [0, 1]
    assert world.decodes[0].starts[1].position == 10
    await until(world.nothing_left)


async def test_tokens_of_an_older_attempt_are_dropped(world: World) -> None:
    """A zombie: the worker goes on sending for an attempt that was given up, at every position."""
    await world.start()
    old: list[ChoiceTokens] = []

    def zombie(tokens: list[ChoiceTokens]) -> list[ChoiceTokens]:
        sent: list[ChoiceTokens] = []
        for entry in tokens:
            if entry.key.attempt > 0:
                sent += [zombie._replace(position=entry.position) for zombie in old[:1]]
                sent.append(entry)
                continue
            old.append(entry._replace(token_ids=(35,)))
            gap = 3 if entry.position == 5 else 0
            sent.append(entry._replace(position=entry.position + gap))
        return sent

    world.decodes[0].tamper = zombie
    check(await world.ask(REQUEST))
    assert [start.attempt for start in world.decodes[0].starts] == [0, 1]


@pytest.mark.parametrize("others", [0, 1])
async def test_prefill_dies_before_it_answered(world: World, others: int) -> None:
    """Another prefill worker takes over; without one, decode prefills."""
    await world.start(prefills=1 + others)
    for prefill in world.prefills:
        prefill.computing.clear()
    asking = asyncio.create_task(world.ask(REQUEST))
    await until(lambda: any(prefill.runs for prefill in world.prefills))
    victim = next(prefill for prefill in world.prefills if prefill.runs)
    for prefill in world.prefills:
        if prefill is not victim:
            prefill.computing.set()
    await victim.kill()
    check(await asking)
    assert sum(len(prefill.runs) for prefill in world.prefills) == 1 + others


async def test_prefill_dies_with_kv_that_was_not_collected(world: World) -> None:
    """Token 0 is the client's already; decode reports that the hand-over failed."""
    await world.start(prefills=2)
    world.decodes[0].collecting.clear()
    stream, answer = await begin(world, REQUEST, 1)
    victim = next(prefill for prefill in world.prefills if prefill.runs)
    await victim.kill()
    world.decodes[0].collecting.set()
    check(await finish(stream, answer))
    assert [start.position for start in world.decodes[0].starts] == [0, 1]


async def test_prefill_dies_after_its_kv_was_collected(world: World) -> None:
    """Its answer never comes, and nobody minds."""
    await world.start()
    world.prefills[0].answering.clear()
    stream, answer = await begin(world, REQUEST, 5)
    await world.prefills[0].kill()
    check(await finish(stream, answer))
    assert [start.attempt for start in world.decodes[0].starts] == [0]


@pytest.mark.deep
@pytest.mark.parametrize("stop", ["", TEXT[90:94]])
async def test_the_detokenizer_dies(world: World, stop: str) -> None:
    await world.start(detokenizers=2)
    request = replace(REQUEST, sampling=SamplingParams(top_logprobs=2))
    expected, text = EXPECTED, TEXT
    if stop:
        request = replace(request, stop_strings=(stop,))
        expected, text = language.stopped(EXPECTED, stop) or ((), "")
    stream, answer, decode = await begin_and_pause(world, request, 20)
    victim = next(d for d in world.detokenizers if d.openings)
    await victim.kill()
    decode.last_position = None
    await finish(stream, answer)
    assert tuple(answer.token_ids[0]) == expected
    assert answer.texts[0] == text
    entries = [entry for delta in answer.deltas for entry in delta.logprobs]
    assert [entry.token.token_id for entry in entries] == list(expected)
    assert all(entry.token.text == bytes([entry.token.token_id]) for entry in entries)
    assert sum(len(d.openings) for d in world.detokenizers) == 2


@pytest.mark.deep
async def test_the_only_detokenizer_dies_at_every_point_and_comes_back(world: World) -> None:
    await world.start()
    address = world.addresses["detokenizer"][0]
    stream, answer, decode = await begin_and_pause(world, REQUEST)
    for last_position in (30, 60, 90):
        await world.detokenizers[-1].kill()
        world.detokenizers.append(ScriptedDetokenizer())
        await world.detokenizers[-1].start(address)
        before = len(answer.token_ids[0])
        decode.last_position = last_position
        async with asyncio.timeout(PATIENCE_S):
            while len(answer.token_ids[0]) == before:
                answer.add(await anext(stream))  # type: ignore[arg-type]
    decode.last_position = None
    check(await finish(stream, answer))


async def test_a_text_that_fails_is_opened_again(world: World) -> None:
    await world.start()
    world.detokenizers[0].fail_next = [Overloaded("too many texts"), Internal("oops")]
    check(await world.ask(REQUEST))
    assert len(world.detokenizers[0].openings) == 3


async def test_a_detokenizer_that_refuses_is_passed_over(world: World) -> None:
    """One that leaves has the fewest texts, and would be picked again and again."""
    await world.start(RouterConfig(max_attempts=2), detokenizers=2)
    world.detokenizers[0].fail_next = [Unavailable("the detokenizer is leaving")] * 9
    check(await world.ask(REQUEST))
    assert len(world.detokenizers[1].openings) == 1


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 4))]
)
async def test_random_deaths(world: World, seed: int) -> None:
    """24 requests of all kinds while workers of every role are killed and replaced."""
    draw = random.Random(seed)
    await world.start(
        RouterConfig(local_prefill_tokens=0, max_attempts=10),
        tokenizers=2,
        prefills=2,
        decodes=2,
        detokenizers=2,
    )
    for decode in world.decodes:
        decode.step_s = 0.004
    stop = TEXT[60:64]
    kept, stopped_text = language.stopped(EXPECTED, stop) or ((), "")
    plain = [world.pipeline.open(replace(REQUEST, n=draw.choice((1, 1, 3)))) for _ in range(16)]
    stopping = [world.pipeline.open(replace(REQUEST, stop_strings=(stop,))) for _ in range(8)]

    async def whole(opening: Any) -> Answer:
        return await read(await opening)

    asking = [asyncio.create_task(whole(opening)) for opening in (*plain, *stopping)]
    roles: dict[str, list[Any]] = {
        "tokenizer": world.tokenizers,
        "prefill": world.prefills,
        "decode": world.decodes,
        "detokenizer": world.detokenizers,
    }
    makers: dict[str, Any] = {
        "prefill": world.new_prefill,
        "decode": world.new_decode,
        "detokenizer": ScriptedDetokenizer,
    }
    for _ in range(5):
        await asyncio.sleep(draw.uniform(0.02, 0.12))
        role = draw.choice(list(makers))
        place = draw.randrange(2)
        address = world.addresses[role][place]
        victim = next(worker for worker in roles[role] if worker.identity.address == address)
        await victim.kill()
        roles[role].remove(victim)
        replacement = makers[role]()
        if role == "decode":
            replacement.step_s = 0.004
        roles[role].append(replacement)
        await replacement.start(address)
    answers = await asyncio.gather(*asking)
    for answer in answers[:16]:
        check(answer, len(answer.texts))
    for answer in answers[16:]:
        assert tuple(answer.token_ids[0]) == kept
        assert answer.texts[0] == stopped_text
    await until(world.nothing_left)
