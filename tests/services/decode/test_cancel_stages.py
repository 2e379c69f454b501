"""An attempt is called off at every stage of its way, by everyone who can; nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from batonlm.core.errors import InvalidArgument, Reason
from batonlm.core.handover.table import LIMITS, SenderState, StateLimit
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.rpc.metrics import DECODE_TOKENS, counter
from tests.services.worker.pair import (
    CHUNK,
    PATIENCE_S,
    Pair,
    attempt,
    keys_of,
    new_id,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import RouterEnd, router

Reach = Callable[[Pair, RouterEnd, Attempt], Awaitable[None]]
"""Lets an attempt come to a stage and stay there."""


async def before_its_first_chunk(world: Pair, end: RouterEnd, one: Attempt) -> None:
    await until(lambda: world.prefill.runner.num_begun == 1)
    await until(lambda: world.decoding.num_attempts == 1)


async def between_two_chunks(world: Pair, end: RouterEnd, one: Attempt) -> None:
    world.prefill.runner.allow(1)
    # Packing is asked for while the second chunk computes, and done before the third one.
    await until(
        lambda: any(o.side.next_index and not o.is_probe for o in world.sender._offers.values())
    )
    world.prefill.runner.allow(1)
    await until(lambda: world.decode.stats.payload_bytes >= 16 * CHUNK)


async def with_unpacking_held(world: Pair, end: RouterEnd, one: Attempt) -> None:
    """The engine of decode is busy with a step, so what was read cannot be unpacked."""
    world.decode.runner.hold()
    await end.start(attempt("other", size=20, seed=9))
    await until(lambda: world.decode.runner.num_begun == 1)
    world.prefill.runner.open()
    await until(lambda: world.prefill.runner.num_done >= 5)


async def running(world: Pair, end: RouterEnd, one: Attempt) -> None:
    world.decode.runner.hold()
    world.prefill.runner.open()
    world.decode.runner.allow(3)
    await until(lambda: len(end.tokens[keys_of(one)[0]]) >= 4)


SOON = {**LIMITS, SenderState.OFFERED: StateLimit("a receiver that was told to go away", 2.0)}

STAGES = (before_its_first_chunk, between_two_chunks, with_unpacking_held, running)


async def begin(world: Pair, end: RouterEnd, one: Attempt) -> asyncio.Task[object]:
    handover_id = new_id()
    world.prefill.runner.hold()
    await end.start(one, handover_id)
    call = world.run(one, handover_id)

    async def answer() -> object:
        try:
            return await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            return error

    return asyncio.create_task(answer())


@pytest.mark.parametrize("reach", STAGES)
async def test_the_router_cancels_both_legs(reach: Reach) -> None:
    one = attempt(n=2)
    async with pair() as world, router(world) as end:
        run = await begin(world, end, one)
        await reach(world, end, one)
        await end.cancel(one)
        await world.cancel_prefill(one)
        await until(lambda: one.key not in world.decoding.attempts)
        await world.settle()
        await run
        assert not [f for f in end.failures if f[0] == one.key]


@pytest.mark.deep
@pytest.mark.parametrize("reach", STAGES)
async def test_only_decode_is_told(reach: Reach) -> None:
    """Prefill finds out by the broken hand-over; what it computes already it still answers."""
    one = attempt(n=2)
    async with pair(limits=SOON) as world, router(world) as end:
        run = await begin(world, end, one)
        await reach(world, end, one)
        await end.cancel(one)
        await until(lambda: one.key not in world.decoding.attempts)
        await world.settle()
        answer = await run
        assert not isinstance(answer, BaseException)
        assert len(answer.choices) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("reach", STAGES[:3])
async def test_only_prefill_is_told(reach: Reach) -> None:
    """Decode then says that the hand-over failed, so that the router tries elsewhere."""
    one = attempt()
    async with pair() as world, router(world) as end:
        run = await begin(world, end, one)
        await reach(world, end, one)
        await world.cancel_prefill(one)
        world.prefill.runner.open()
        world.decode.runner.open()
        if reach is with_unpacking_held:
            # All of it may have been handed over; then decode needs nobody any more.
            await until(lambda: bool(end.failures) or keys_of(one)[0] in end.ends)
        else:
            error = await end.failed(one)
            assert error.reason in (Reason.HANDOVER_FAILED, Reason.CANCELLED)
        await world.settle()
        await run


@pytest.mark.deep
@pytest.mark.parametrize("reach", STAGES)
async def test_the_router_dies(reach: Reach) -> None:
    one = attempt(n=2)
    async with pair(resume_window_s=0.3) as world, router(world) as end:
        run = await begin(world, end, one)
        await reach(world, end, one)
        run.cancel()
        await end.break_off()
        await until(lambda: len(world.decoding.sessions) == 0)
        await world.settle()


async def test_a_choice_that_is_cancelled_before_its_input_is_here_never_runs() -> None:
    one, sampled = attempt(n=3), counter(DECODE_TOKENS)._value.get()
    async with pair() as world, router(world) as end:
        run = await begin(world, end, one)
        await before_its_first_chunk(world, end, one)
        await end.cancel(one, 1)
        await until(lambda: world.decoding.attempts[one.key].choices == {0, 2})
        world.prefill.runner.open()
        key = SequenceKey("r", 1, 0)
        await until(lambda: {k for k in keys_of(one) if k != key} <= set(end.ends))
        assert not end.failures and not end.tokens[key]
        assert [end.tokens[k] for k in keys_of(one) if k != key] == [
            ids for choice, ids in reference(one).items() if choice != 1
        ]
        await run
        await world.settle()
        assert counter(DECODE_TOKENS)._value.get() == sampled + 2 * 12


async def test_choices_are_cancelled_one_by_one_while_they_run() -> None:
    one = attempt(n=3, max_tokens=200)
    async with pair() as world, router(world) as end:
        run = await begin(world, end, one)
        await running(world, end, one)
        for choice in (2, 0):
            await end.cancel(one, choice)
        await until(lambda: world.decoding.attempts[one.key].choices == {1})
        world.decode.runner.open()
        await until(lambda: SequenceKey("r", 1, 0) in end.ends)
        assert end.tokens[SequenceKey("r", 1, 0)] == reference(one)[1]
        assert not end.failures
        await run


async def test_another_router_can_neither_cancel_nor_take_over_an_attempt() -> None:
    one = attempt(max_tokens=30)
    async with pair() as world, router(world) as end, router(world) as stranger:
        world.decode.runner.hold()
        await end.start(one)
        await until(lambda: world.decode.runner.num_begun == 1)
        await stranger.cancel(one)
        await stranger.start(one)
        assert isinstance(await stranger.failed(one), InvalidArgument)
        world.decode.runner.open()
        assert await end.ended(one) == reference(one)


async def test_a_start_that_is_said_twice_starts_once() -> None:
    one = attempt(max_tokens=30)
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        await end.start(one)
        await end.start(one)
        world.decode.runner.open()
        assert await end.ended(one) == reference(one)
        assert world.decode.runner.num_done < 2 * 35


async def test_no_room_on_decode_is_told_and_prefill_keeps_nothing() -> None:
    big, one = attempt("big", size=900, seed=5, max_tokens=100), attempt(size=900)
    async with pair(block_sizes=(16, 8)) as world, router(world) as end:
        # It pauses after a token, as one does whose stop strings are looked for, and owns blocks.
        await end.start(big, max_unconfirmed=1)
        await until(lambda: len(end.tokens[keys_of(big)[0]]) == 1)
        handover_id = new_id()
        await end.start(one, handover_id)
        answer = await world.run(one, handover_id)
        assert (await end.failed(one)).reason is Reason.OVERLOADED
        # Token 0 is of use, and the next try finds the prompt in the cache.
        assert len(answer.choices) == 1
        await until(lambda: world.sender.num_offers == 0)
        await until(lambda: world.prefilling.num_attempts == 0)
        async with asyncio.timeout(PATIENCE_S):
            while not await world.prefill.is_idle():  # noqa: ASYNC110  # nobody tells of idleness
                await asyncio.sleep(0.01)
        await end.cancel(big)
