"""The request that disturbed tests send, its one right answer, and how to stop midway."""

from __future__ import annotations

import asyncio

from batonlm.core.request.request import Delta, Finished, Request, TextPrompt
from batonlm.core.routing.load import WorkerState
from batonlm.router.request.pipeline import EventStream
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDecode
from tests.services.router.conftest import PATIENCE_S, Answer, World, until

PROMPT = "the cat sat on the mat"
IDS = tuple(PROMPT.encode())
REQUEST = Request(TextPrompt(PROMPT), seed=3, max_tokens=120, ignore_eos=True)
EXPECTED, _ = language.answer(IDS, 3, 0, 120, ignore_eos=True)
TEXT = language.text_of(EXPECTED)
STEP_S = 0.005
"""Long enough for a drain to be seen in mid-answer, as a rule."""
HELD_AT = 40
"""Where an answer waits for a drain that is seen late, on a machine that is busy elsewhere."""


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


async def begin_and_pause(
    world: World, request: Request, num_tokens: int = 3
) -> tuple[EventStream, Answer, ScriptedDecode]:
    """As `begin`, and the decode worker that it runs on. That one goes no further: what a test does
    to it comes amid the answer, however slow the machine is."""
    for decode in world.decodes:
        decode.last_position = num_tokens + 10
    stream, answer = await begin(world, request, num_tokens)
    paused = busy(world)
    for decode in world.decodes:
        if decode is not paused:
            decode.last_position = None
    return stream, answer, paused


async def finish(stream: EventStream, answer: Answer) -> Answer:
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if isinstance(event, Delta):
                answer.add(event)
            if isinstance(event, Finished):
                answer.finished = event
    await stream.aclose()
    return answer


def busy(world: World) -> ScriptedDecode:
    return next(decode for decode in world.decodes if decode.holds())


async def begin_to_move(
    world: World, request: Request
) -> tuple[EventStream, Answer, ScriptedDecode]:
    """As `begin`, and the decode worker that it runs on, for `drain`."""
    for decode in world.decodes:
        decode.step_s, decode.last_position = STEP_S, HELD_AT
    stream, answer = await begin(world, request, 5)
    return stream, answer, busy(world)


async def drain(world: World, leaving: ScriptedDecode, sequences: int = 1) -> None:
    """Returns when the router has asked for so many sequences of the worker that drains."""
    leaving.state = WorkerState.DRAINING
    await until(lambda: len(leaving.wishes) >= sequences)
    for decode in world.decodes:
        decode.last_position = None


async def moved(world: World) -> Answer:
    """A right answer that was begun by one of two decode workers, which then left."""
    await world.start(decodes=2)
    stream, answer, leaving = await begin_to_move(world, REQUEST)
    await drain(world, leaving)
    check(await finish(stream, answer))
    return answer
