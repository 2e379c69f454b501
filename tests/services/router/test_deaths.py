"""Workers die, hang, refuse and break their word; the client reads the same answer all the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.services.router import language
from tests.services.router.conftest import PATIENCE_S, Answer, World, read, until
from tests.services.router.workers import FakeDecode, FakeDetokenizer, FakePrefill

from baton.core.attempt import ChoiceTokens
from baton.core.errors import (
    HandoverFailed,
    Internal,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from baton.core.load import WorkerState
from baton.core.request import Delta, Request, SamplingParams, TextPrompt
from baton.router.config import RouterConfig
from baton.router.event_stream import EventStream

PROMPT = "the cat sat on the mat"
IDS = tuple(PROMPT.encode())
REQUEST = Request(TextPrompt(PROMPT), seed=3, max_tokens=120, ignore_eos=True)
EXPECTED, _ = language.answer(IDS, 3, 0, 120, ignore_eos=True)
TEXT = language.text_of(EXPECTED)


def check(answer: Answer, n: int = 1) -> None:
    for choice in range(n):
        expected, reason = language.answer(IDS, 3, choice, 120, ignore_eos=True)
        assert tuple(answer.token_ids[choice]) == expected
        assert answer.texts[choice] == language.text_of(expected)
        assert answer.reason(choice) is reason


async def begin(world: World, request: Request, num_tokens: int = 3) -> tuple[EventStream, Answer]:
    """A stream of which so many tokens are read, and what they are."""
    stream = await world.pipeline.open(request)
    async with asyncio.timeout(PATIENCE_S):
        answer = Answer(await anext(stream))  # type: ignore[arg-type]
        while sum(map(len, answer.token_ids.values())) < num_tokens:
            delta = await anext(stream)
            assert isinstance(delta, Delta)
            answer.add(delta)
    return stream, answer


async def finish(stream: EventStream, answer: Answer) -> Answer:
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if isinstance(event, Delta):
                answer.add(event)
    await stream.aclose()
    return answer


def busy(world: World) -> FakeDecode:
    return next(decode for decode in world.decodes if decode.holds())


@pytest.mark.parametrize("n", [1, 4])
async def test_decode_dies_in_the_middle(world: World, n: int) -> None:
    await world.start(decodes=2)
    stream, answer = await begin(world, replace(REQUEST, n=n), 12)
    await busy(world).kill()
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
    stream, answer = await begin(world, replace(REQUEST, seed=11, n=4, ignore_eos=False), 1)
    victim = busy(world)
    async with asyncio.timeout(PATIENCE_S):
        while not answer.last:
            answer.add(await anext(stream))  # type: ignore[arg-type]
    ended = set(answer.last)
    await victim.kill()
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
    stream, answer = await begin(world, REQUEST)
    address = world.addresses["decode"][0]
    await world.decodes[0].kill()
    heir = world.new_decode()
    world.decodes.append(heir)
    await heir.start(address)
    check(await finish(stream, answer))
    assert heir.starts


async def test_a_broken_session_is_resumed(world: World) -> None:
    """The worker lives: nothing is run again."""
    await world.start()
    world.decodes[0].step_s = 0.005
    stream, answer = await begin(world, replace(REQUEST, n=2))
    world.decodes[0].break_stream.set()
    check(await finish(stream, answer), 2)
    assert [start.attempt for start in world.decodes[0].starts] == [0]
    assert len(world.decodes[0].hellos) == 2
    assert {entry.choice for entry in world.decodes[0].hellos[1].resume} == {0, 1}


async def test_a_resumed_session_that_lost_a_sequence_runs_it_again(world: World) -> None:
    await world.start()
    world.decodes[0].step_s = 0.005
    stream, answer = await begin(world, REQUEST)
    world.decodes[0].running.clear()
    world.decodes[0].break_stream.set()
    check(await finish(stream, answer))
    assert [start.attempt for start in world.decodes[0].starts] == [0, 1]


async def test_a_silent_decode_worker_is_dead(world: World) -> None:
    await world.start(decodes=2)
    stream, answer = await begin(world, REQUEST)
    victim = busy(world)
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
                sent += [replace(zombie, position=entry.position) for zombie in old[:1]]
                sent.append(entry)
                continue
            old.append(replace(entry, token_ids=(35,)))
            gap = 3 if entry.position == 5 else 0
            sent.append(replace(entry, position=entry.position + gap))
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
    collect = FakeDecode._collect
    waiting = asyncio.Event()

    async def late(self: FakeDecode, running: Any) -> None:
        await waiting.wait()
        await collect(self, running)

    world.decodes[0]._collect = late.__get__(world.decodes[0])  # type: ignore[method-assign]
    stream, answer = await begin(world, REQUEST, 1)
    victim = next(prefill for prefill in world.prefills if prefill.runs)
    await victim.kill()
    waiting.set()
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


@pytest.mark.parametrize("stop", ["", TEXT[90:94]])
async def test_the_detokenizer_dies(world: World, stop: str) -> None:
    await world.start(detokenizers=2)
    request = replace(REQUEST, sampling=SamplingParams(top_logprobs=2))
    expected, text = EXPECTED, TEXT
    if stop:
        request = replace(request, stop_strings=(stop,))
        expected, text = language.stopped(EXPECTED, stop) or ((), "")
    stream, answer = await begin(world, request, 20)
    victim = next(d for d in world.detokenizers if d.openings)
    await victim.kill()
    await finish(stream, answer)
    assert tuple(answer.token_ids[0]) == expected
    assert answer.texts[0] == text
    entries = [entry for delta in answer.deltas for entry in delta.logprobs]
    assert [entry.token.token_id for entry in entries] == list(expected)
    assert all(entry.token.text == bytes([entry.token.token_id]) for entry in entries)
    assert sum(len(d.openings) for d in world.detokenizers) == 2


async def test_the_only_detokenizer_dies_at_every_point_and_comes_back(world: World) -> None:
    await world.start()
    address = world.addresses["detokenizer"][0]
    world.decodes[0].step_s = 0.01
    stream, answer = await begin(world, REQUEST)
    for _ in range(3):
        await world.detokenizers[-1].kill()
        world.detokenizers.append(FakeDetokenizer())
        await world.detokenizers[-1].start(address)
        before = len(answer.token_ids[0])
        async with asyncio.timeout(PATIENCE_S):
            while len(answer.token_ids[0]) == before:
                answer.add(await anext(stream))  # type: ignore[arg-type]
    check(await finish(stream, answer))


async def test_a_text_that_fails_is_opened_again(world: World) -> None:
    await world.start()
    world.detokenizers[0].fail_next = [Overloaded("too many texts"), Internal("oops")]
    check(await world.ask(REQUEST))
    assert len(world.detokenizers[0].openings) == 3


async def test_another_tokenizer_is_asked(world: World) -> None:
    await world.start(tokenizers=2)
    for tokenizer in world.tokenizers:
        tokenizer.refusals = [Unavailable("leaving")]
    check(await world.ask(REQUEST))


async def test_a_prompt_at_fault_is_not_tried_again(world: World) -> None:
    await world.start()
    world.tokenizers[0].refusals = [InvalidArgument("no", field="prompt"), Internal("not reached")]
    with pytest.raises(InvalidArgument):
        await world.pipeline.open(REQUEST)
    assert len(world.tokenizers[0].refusals) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_overloaded_worker_is_waited_for(world: World, role: str) -> None:
    """However often it refuses: that is no failure, and prefill's load is not decode's."""
    await world.start()
    worker: FakePrefill | FakeDecode = world.prefills[0] if role == "prefill" else world.decodes[0]
    worker.refusals = [Overloaded("full", retry_after_s=0.01) for _ in range(6)]
    check(await world.ask(REQUEST))
    assert worker.refusals == []
    runs = world.prefills[0].runs if role == "prefill" else world.decodes[0].starts
    assert [run.attempt for run in runs] == list(range(7))
    await until(world.nothing_left)


async def test_an_overloaded_worker_is_passed_over(world: World) -> None:
    await world.start(prefills=2)
    for prefill in world.prefills:
        prefill.refusals = [Overloaded("full", retry_after_s=60.0)]
    world.prefills[0].refusals = []
    for _ in range(4):
        check(await world.ask(REQUEST))


async def test_a_failed_handover_is_repeated_elsewhere(world: World) -> None:
    await world.start(prefills=2)
    world.decodes[0].refusals = [HandoverFailed("no KV came")]
    check(await world.ask(REQUEST))
    ran = [{run.attempt for run in prefill.runs} for prefill in world.prefills]
    assert {1} in ran, "the second attempt's giver did not run the first"


async def test_a_request_gives_up_after_failures_without_progress(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, max_attempts=3))
    world.decodes[0].refusals = [Internal("broken") for _ in range(9)]
    with pytest.raises(Internal, match="broken"):
        await world.ask(REQUEST)
    assert len(world.decodes[0].starts) == 3
    await until(world.nothing_left)


async def test_a_failure_of_the_request_itself_is_not_repeated(world: World) -> None:
    await world.start()
    world.prefills[0].refusals = [InvalidArgument("no such thing", field="logit_bias")]
    with pytest.raises(InvalidArgument):
        await world.ask(REQUEST)
    assert len(world.prefills[0].runs) == 1
    await until(world.nothing_left)


async def test_draining_workers_get_nothing_new(world: World) -> None:
    await world.start(decodes=2)
    world.decodes[0].state = WorkerState.DRAINING
    fleet = world.fleet
    assert fleet is not None
    await until(
        lambda: any(s.load.state is WorkerState.DRAINING for s in fleet.decodes.snapshots())
    )
    for _ in range(4):
        check(await world.ask(REQUEST))
    assert world.decodes[0].starts == []


async def test_with_no_worker_for_too_long_a_request_is_refused(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, wait_timeout_s=0.3))
    await world.decodes[0].kill()
    await until(lambda: world.met()["decode"] == 0)
    with pytest.raises(Unavailable):
        await world.pipeline.open(REQUEST)
    assert world.pipeline.num_requests == 0


async def test_decode_workers_that_die_in_mid_stream_for_good_end_it(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, wait_timeout_s=0.3))
    stream, answer = await begin(world, REQUEST)
    await world.decodes[0].kill()
    with pytest.raises(Unavailable):
        await finish(stream, answer)
    await stream.aclose()
    assert tuple(answer.token_ids[0]) == EXPECTED[: len(answer.token_ids[0])]
    await until(world.nothing_left)


@pytest.mark.parametrize("seed", range(4))
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
        "detokenizer": FakeDetokenizer,
    }
    for _ in range(5):
        await asyncio.sleep(draw.uniform(0.02, 0.12))
        role = draw.choice(list(makers))
        place = draw.randrange(2)
        address = world.addresses[role][place]
        victim = next(worker for worker in roles[role] if worker.identity.address == address)
        await victim.kill()
        roles[role].remove(victim)
        heir = makers[role]()
        if role == "decode":
            heir.step_s = 0.004
        roles[role].append(heir)
        await heir.start(address)
    answers = await asyncio.gather(*asking)
    for answer in answers[:16]:
        check(answer, len(answer.texts))
    for answer in answers[16:]:
        assert tuple(answer.token_ids[0]) == kept
        assert answer.texts[0] == stopped_text
    await until(world.nothing_left)
