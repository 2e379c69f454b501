"""How far decode runs ahead, where it stops, and what a drain leaves undone."""

from __future__ import annotations

import asyncio

import pytest

from batonlm.core.errors import DeadlineExceeded, HandoverFailed, Internal, Unavailable
from batonlm.core.request.request import FinishReason
from batonlm.core.routing.load import WorkerState
from tests.services.worker.pair import (
    PATIENCE_S,
    POISON,
    attempt,
    keys_of,
    new_id,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import router


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("ahead", [1, 3])
async def test_it_stays_a_few_positions_ahead_of_confirmed_ones(
    ahead: int, handed_over: bool
) -> None:
    one = attempt(size=40)
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end:
        if handed_over:
            handover_id = new_id()
            await end.start(one, handover_id, max_unconfirmed=ahead)
            await world.run(one, handover_id)
        else:
            await end.start(one, max_unconfirmed=ahead)
        for confirmed in range(12):
            await until(lambda at=confirmed: len(end.tokens[key]) >= min(at + ahead, 12))  # type: ignore[misc]
            # A paused sequence leaves the engine nothing to do, so more would have come by now.
            await world.decode.engine.call(lambda loop: None)
            assert len(end.tokens[key]) <= min(confirmed + ahead, 12)
            await end.confirm(key, confirmed + 1)
        assert await end.ended(one) == reference(one)


async def test_token_0_that_is_confirmed_before_decode_has_the_kv_is_not_waited_for() -> None:
    """Prefill's answer may be shown, and searched for stop strings, long before."""
    one = attempt(size=40)
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        await end.start(attempt("busy", size=20, seed=9))
        await until(lambda: world.decode.runner.num_begun == 1)
        handover_id = new_id()
        await end.start(one, handover_id, max_unconfirmed=1)
        await world.run(one, handover_id)
        await end.confirm(key, 1)
        await until(lambda: bool(world.decoding.attempts[one.key].confirmed))
        world.decode.runner.open()
        for position in range(1, 12):
            await until(lambda at=position: len(end.tokens[key]) > at)  # type: ignore[misc]
            await end.confirm(key, position + 1)
        await until(lambda: key in end.ends)
        assert end.tokens[key] == reference(one)[0]


async def test_confirmations_of_others_are_passed_over() -> None:
    one = attempt(size=40)
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end, router(world) as stranger:
        await end.start(one, max_unconfirmed=2)
        await until(lambda: len(end.tokens[key]) == 2)
        await stranger.confirm(key, 2)
        await stranger.confirm(keys_of(attempt("unknown"))[0], 5)
        await until(lambda: stranger.num_heartbeats > 0)
        await world.decode.engine.call(lambda loop: None)
        assert len(end.tokens[key]) == 2
        await end.confirm(key, 12)
        await until(lambda: len(end.tokens[key]) == 4)
        await end.cancel(one)


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_stop_token_ends_its_choice_only(handed_over: bool) -> None:
    free = reference(attempt(n=3, max_tokens=20))
    stop = next(t for t in free[1][3:] if t not in free[0])
    one = attempt(n=3, max_tokens=20, stop_token_ids=(stop,))
    async with pair() as world, router(world) as end:
        handover_id = new_id() if handed_over else b""
        await end.start(one, handover_id)
        if handed_over:
            await world.run(one, handover_id)
        expected = reference(one)
        assert await end.ended(one) == expected
        assert expected[1][-1] == stop and len(expected[1]) < 20
        assert end.ends[keys_of(one)[1]] is FinishReason.STOP
        assert end.ends[keys_of(one)[0]] is FinishReason.LENGTH


async def test_a_choice_that_ends_with_token_0_leaves_the_others_running() -> None:
    firsts = {choice: ids[0] for choice, ids in reference(attempt(n=3, seed=4)).items()}
    one = attempt(n=3, seed=4, stop_token_ids=(firsts[1],))
    assert len(set(firsts.values())) == 3
    async with pair() as world, router(world) as end:
        handover_id = new_id()
        await end.start(one, handover_id)
        await world.run(one, handover_id)
        assert await end.ended(one) == reference(one)
        assert end.tokens[keys_of(one)[1]] == [firsts[1]]


async def test_a_sequence_whose_logits_are_broken_fails_alone() -> None:
    bad, good = attempt("bad", size=30, last_token=POISON), attempt("good", max_tokens=30)
    async with pair() as world, router(world) as end:
        await end.start(good)
        await end.start(bad)
        assert isinstance(await end.failed(bad), Internal)
        end.failures.clear()
        assert await end.ended(good) == reference(good)


async def test_an_attempt_that_is_out_of_time_in_the_queue_ends() -> None:
    big, late = attempt("big", size=900, max_tokens=100), attempt("late", seed=2, remaining_s=0.05)
    async with pair(block_sizes=(16, 8)) as world, router(world) as end:
        await end.start(big, max_unconfirmed=1)
        await until(lambda: len(end.tokens[keys_of(big)[0]]) == 1)
        await end.start(late)
        assert isinstance(await end.failed(late), DeadlineExceeded)
        await end.cancel(big)


async def test_a_handover_nobody_offers_is_given_up_and_means_prefill_again() -> None:
    one = attempt()
    async with pair(handover_timeout_s=0.2) as world, router(world) as end:
        await end.start(one, new_id())
        assert isinstance(await end.failed(one), HandoverFailed)


async def test_a_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    local, given, new = attempt("local", max_tokens=30), attempt("given", seed=2), attempt("new")
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        await end.start(local)
        await until(lambda: world.decode.runner.num_begun == 1)
        handover_id = new_id()
        await end.start(given, handover_id)
        run = asyncio.ensure_future(world.run(given, handover_id))
        await until(lambda: world.decoding.num_attempts == 2)
        draining = asyncio.create_task(world.decoding.drain())
        await until(lambda: world.decoding.state is WorkerState.DRAINING)
        await end.start(new)
        assert isinstance(await end.failed(new), Unavailable)
        end.failures.clear()
        assert not draining.done()
        world.decode.runner.open()
        async with asyncio.timeout(PATIENCE_S):
            await draining
        await run
        assert await end.ended(local) == reference(local)
        assert await end.ended(given) == reference(given)
