"""Sequences that leave: here they come back to the same worker, over its own two ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from batonlm.core.errors import HandoverFailed
from batonlm.core.handover.table import LIMITS, SenderState, StateLimit
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.decode import service
from batonlm.rpc.metrics import PREFILL_TOKENS, REGISTRY
from batonlm.testing.fake_runner import FakeRunner
from tests.services.worker.pair import (
    PATIENCE_S,
    GatedRunner,
    Pair,
    attempt,
    keys_of,
    new_id,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import RouterEnd, router

FIRST = 20
"""Tokens before anything happens."""


def running(n: int = 1, size: int = 300) -> Attempt:
    return attempt("leaves", size=size, n=n, max_tokens=300)


async def begin(world: Pair, end: RouterEnd, one: Attempt, max_unconfirmed: int = 0) -> None:
    """Runs it for a while and then step by step, so that nothing ends by itself."""
    world.decode.runner.hold()
    world.decode.runner.allow(FIRST)
    await end.start(one, max_unconfirmed=max_unconfirmed)
    await until(lambda: all(len(end.tokens[key]) >= 5 for key in keys_of(one)))


async def given(world: Pair, end: RouterEnd, key: SequenceKey) -> tuple[bytes, int | None]:
    """The answer to the wish; steps go on meanwhile."""

    def answered() -> bool:
        if key not in end.migrated_out:
            world.decode.runner.allow(1)
        return key in end.migrated_out

    await until(answered)
    return end.migrated_out[key]


async def leaves(world: Pair, end: RouterEnd, key: SequenceKey) -> bytes:
    """Has a running sequence leave. Returns the id of its hand-over."""
    handover_id = new_id()
    await end.hand_over(key, handover_id)
    await given(world, end, key)
    return handover_id


async def begin_and_leave(world: Pair, end: RouterEnd, one: Attempt) -> bytes:
    """Runs it for a while, and has its only sequence leave."""
    await begin(world, end, one)
    (key,) = keys_of(one)
    return await leaves(world, end, key)


def replacement_model(one: Attempt, end: RouterEnd, key: SequenceKey, number: int) -> Attempt:
    output = end.tokens[key]
    ids = (*one.token_ids, *output[:-1])
    return replace(one, attempt=number, choices=(key.choice,), token_ids=ids)


async def test_it_leaves_and_goes_on_without_computing_anything_again() -> None:
    one = running(n=2)
    expected = reference(one)
    async with pair() as world, router(world) as end:
        await begin(world, end, one)
        before = REGISTRY.get_sample_value(PREFILL_TOKENS.name)
        heirs = []
        for number, key in enumerate(keys_of(one), 1):
            handover_id = new_id()
            await end.hand_over(key, handover_id)
            assert await given(world, end, key) == (handover_id, len(end.tokens[key]))
            heirs.append(replacement_model(one, end, key, number))
            await end.start(heirs[-1], handover_id, sender=world.decode.identity)
        world.decode.runner.open()
        for replacement in heirs:
            (choice,) = replacement.choices
            rest = (await end.ended(replacement))[choice]
            assert expected[choice][: replacement.position] + rest == expected[choice]
            began = end.started[replacement.key]
            assert began.cached_tokens + began.received_bytes // 16 == len(replacement.token_ids)
        assert REGISTRY.get_sample_value(PREFILL_TOKENS.name) == before


async def test_what_is_not_running_stays() -> None:
    one = attempt("collects", size=40)
    stranger = SequenceKey("nobody", 0, 0)
    async with pair() as world, router(world) as end, router(world) as foreign:
        handover_id = new_id()
        await end.start(one, handover_id)
        for key in (stranger, keys_of(one)[0]):
            await end.hand_over(key, new_id())
            assert (await given(world, end, key))[1] is None
        await world.run(one, handover_id)
        assert await end.ended(one) == reference(one)
        two = running()
        await begin(world, end, two)
        await foreign.hand_over(keys_of(two)[0], new_id())
        assert (await given(world, foreign, keys_of(two)[0]))[1] is None, "another router's"
        await end.hand_over(keys_of(two)[0], b"short")
        assert await given(world, end, keys_of(two)[0]) == (b"short", None)
        await end.cancel(two)


async def test_one_that_ends_meanwhile_is_not_offered() -> None:
    one = attempt("ends", size=40, max_tokens=21)
    async with pair() as world, router(world) as end:
        await begin(world, end, one)
        await end.hand_over(keys_of(one)[0], new_id())
        world.decode.runner.open()
        key = keys_of(one)[0]
        await until(
            lambda: key in end.ends or end.migrated_out.get(key, (b"", None))[1] is not None
        )
        await end.cancel(one)


async def test_nobody_comes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TAKE_BACK_S", 0.2)
    one = running()
    limits = {**LIMITS, SenderState.OFFERED: StateLimit("the test", 0.2)}
    async with pair(limits=limits) as world, router(world) as end:
        await begin(world, end, one)
        await end.hand_over(keys_of(one)[0], new_id())
        assert (await given(world, end, keys_of(one)[0]))[1] is not None
        assert isinstance(await end.failed(one), HandoverFailed)


async def test_a_cancel_takes_the_offer_back() -> None:
    one = running(n=2)
    async with pair() as world, router(world) as end:
        await begin(world, end, one)
        first, second = keys_of(one)
        await end.hand_over(first, new_id())
        await given(world, end, first)
        await end.cancel(one, first.choice)
        await until(lambda: world.departing.num_offers == 0)
        world.decode.runner.open()
        await until(lambda: second in end.ends)
        assert end.tokens[second] == reference(one)[second.choice]


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_what_nobody_collects_runs_on_where_it_was(draining: bool, n: int) -> None:
    one = running(n=n)
    expected = reference(one)
    async with pair() as world, router(world) as end:
        await begin(world, end, one)
        before = REGISTRY.get_sample_value(PREFILL_TOKENS.name)
        leaving = asyncio.create_task(world.decoding.drain()) if draining else None
        key = keys_of(one)[-1]
        handover_id = await leaves(world, end, key)
        back = replacement_model(one, end, key, 1)
        world.decode.runner.open()
        await end.start(back, held_handover_id=handover_id)
        rest = (await end.ended(back))[key.choice]
        assert expected[key.choice][: back.position] + rest == expected[key.choice]
        assert end.started[back.key].received_bytes == 0
        assert end.started[back.key].cached_tokens == len(back.token_ids)
        assert REGISTRY.get_sample_value(PREFILL_TOKENS.name) == before
        assert world.departing.num_offers == 0
        if n > 1:
            await until(lambda: keys_of(one)[0] in end.ends)
            assert end.tokens[keys_of(one)[0]] == expected[0]
        if leaving is not None:
            await end.break_off()
            await asyncio.wait_for(leaving, PATIENCE_S)


async def test_it_runs_on_after_its_hand_over_has_failed() -> None:
    one = running()
    key = keys_of(one)[0]
    limits = {**LIMITS, SenderState.OFFERED: StateLimit("the test", 0.1)}
    async with pair(limits=limits) as world, router(world) as end:
        handover_id = await begin_and_leave(world, end, one)
        await until(lambda: world.departing.num_offers == 0)
        assert not end.failures, "it is held"
        world.decode.runner.open()
        back = replacement_model(one, end, key, 1)
        await end.start(back, held_handover_id=handover_id)
        # It may leave again, under another id.
        await until(lambda: len(end.tokens[keys_of(back)[0]]) > 3)
        again = new_id()
        await end.hand_over(keys_of(back)[0], again)
        await until(lambda: bool({keys_of(back)[0]} & (end.migrated_out.keys() | end.ends.keys())))
        if keys_of(back)[0] in end.migrated_out:
            output = [*one.token_ids, *reference(one)[0]]
            _, at = end.migrated_out[keys_of(back)[0]]
            assert at is not None
            third = replace(one, attempt=2, token_ids=tuple(output[: len(one.token_ids) + at - 1]))
            await end.start(third, held_handover_id=again)
            rest = (await end.ended(third))[0]
            assert reference(one)[0][third.position :] == rest


async def test_only_its_own_router_takes_it_back_and_once() -> None:
    one = running()
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end, router(world) as foreign:
        handover_id = await begin_and_leave(world, end, one)
        back = replacement_model(one, end, key, 1)
        await foreign.start(back, held_handover_id=handover_id)
        assert isinstance(await foreign.failed(back), HandoverFailed)
        other = replace(back, attempt=2)
        await end.start(replace(other, request_id="another"), held_handover_id=handover_id)
        await end.start(other, held_handover_id=new_id())
        assert isinstance(await end.failed(other), HandoverFailed)
        world.decode.runner.open()
        await end.start(back, held_handover_id=handover_id)
        third = replace(back, attempt=3)
        await end.start(third, held_handover_id=handover_id)
        assert isinstance(await end.failed(third), HandoverFailed)
        await until(lambda: keys_of(back)[0] in end.ends)
        assert end.tokens[keys_of(back)[0]] == reference(one)[0][back.position :]


async def test_what_was_collected_is_not_taken_back() -> None:
    one = running()
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end:
        handover_id = await begin_and_leave(world, end, one)
        world.decode.runner.open()
        moved = replacement_model(one, end, key, 1)
        await end.start(moved, handover_id, sender=world.decode.identity)
        await until(lambda: moved.key in end.started)
        late = replacement_model(one, end, key, 2)
        await end.start(late, held_handover_id=handover_id)
        assert isinstance(await end.failed(late), HandoverFailed)
        await until(lambda: keys_of(moved)[0] in end.ends)
        assert end.tokens[keys_of(moved)[0]] == reference(one)[0][moved.position :]


@pytest.mark.parametrize("ends", ["the old attempt", "the new one", "both", "the router"])
async def test_what_is_cancelled_while_it_comes_back_leaves_nothing(ends: str) -> None:
    one = running()
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end:
        handover_id = await begin_and_leave(world, end, one)
        back = replacement_model(one, end, key, 1)
        await end.start(back, held_handover_id=handover_id)
        if ends in ("the old attempt", "both"):
            await end.cancel(one)
        if ends in ("the new one", "both"):
            await end.cancel(back)
        if ends == "the router":
            await end.break_off()
        world.decode.runner.open()
        await world.settle()


async def test_a_new_stream_hears_of_it_again_and_does_not_end_it() -> None:
    one = running()
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end:
        await begin(world, end, one)
        handover_id = new_id()
        await end.hand_over(key, handover_id)
        answer = await given(world, end, key)
        await end.break_off()
        end.migrated_out.clear()
        await end.connect(end.next_positions())
        await until(lambda: end.migrated_out.get(key) == answer)
        await end.break_off()
        # By now the router has let go of the old attempt, and started the next one.
        await end.connect({})
        replacement = replacement_model(one, end, key, 1)
        world.decode.runner.open()
        await end.start(replacement, handover_id, sender=world.decode.identity)
        assert (await end.ended(replacement))[0] == reference(one)[0][replacement.position :]


async def test_asking_twice_changes_nothing() -> None:
    one = running()
    key = keys_of(one)[0]
    async with pair() as world, router(world) as end:
        await begin(world, end, one)
        handover_id = new_id()
        await end.hand_over(key, handover_id)
        await end.hand_over(key, new_id())
        assert (await given(world, end, key))[0] == handover_id
        await end.hand_over(key, new_id())
        await end.cancel(one)


async def test_its_kv_is_packed_beside_a_step_and_stays_until_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step of another sequence runs, and the one that leaves is cancelled meanwhile."""
    packing, may_end = threading.Event(), threading.Event()

    def pack(
        runner: GatedRunner, extents: Extents, first_position: int, count: int, out: memoryview
    ) -> None:
        packing.set()
        assert may_end.wait(PATIENCE_S)
        FakeRunner.pack(runner, extents, first_position, count, out)

    one, other = running(), attempt("stays", size=20, max_tokens=300)
    (key,) = keys_of(one)
    async with pair() as world, router(world) as end:
        decode = world.decode
        monkeypatch.setattr(GatedRunner, "copies_beside_steps", True)
        monkeypatch.setattr(GatedRunner, "pack", pack)
        await begin(world, end, one)
        await end.start(other)
        handover_id = await leaves(world, end, key)
        # By a salt of its own it finds nothing in the prefix cache: at a full block that is all.
        replacement = replace(replacement_model(one, end, key, 1), cache_salt=b"cold")
        await end.start(replacement, handover_id, sender=decode.identity)

        def steps_go_on() -> bool:
            decode.runner.allow(1)
            return packing.is_set()

        async def held() -> bool:
            decode.runner.allow(1)
            return await decode.engine.call(lambda loop: key in loop.scheduler.sequences.held)

        try:
            await until(steps_go_on)
            done = decode.runner.num_done
            decode.runner.allow(3)
            await until(lambda: decode.runner.num_done >= done + 3)
            await end.cancel(one)
            await until(lambda: one.key not in world.decoding.attempts)
            assert await held(), "its blocks are being copied"
        finally:
            may_end.set()
        decode.runner.open()
        await until(lambda: not world.departing.num_offers)
        assert not await held()
        await end.cancel(replacement)
        await end.cancel(other)
