"""Sequences that leave: here they come back to the same worker, over its own two ends."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from batonlm.core.errors import HandoverFailed
from batonlm.core.handover.table import LIMITS, SenderState, StateLimit
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.attempt import Attempt, SequenceKey
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


async def test_nobody_comes_for_it() -> None:
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
        handover_id = new_id()
        await end.hand_over(key, handover_id)
        await given(world, end, key)
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
