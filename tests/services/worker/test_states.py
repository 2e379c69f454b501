"""Two workers of a model with a state: it follows a prompt's KV, and a sequence that leaves."""

from __future__ import annotations

import threading
from dataclasses import replace
from math import lcm

import pytest

from batonlm.core.errors import Incompatible
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.kvcache.prefix import UNIT_TOKENS
from batonlm.testing.fake_runner import FakeRunner
from batonlm.transfer import nixl
from tests.services.worker.pair import (
    PATIENCE_S,
    POISON,
    GatedRunner,
    attempt,
    keys_of,
    new_id,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import router

STATE = 300
"""Positions: more than a KV chunk carries."""

TRANSPORTS = [
    "loopback",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl.available(), reason="no NIXL here")),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block_sizes", [(16, 16), (8, 32), (24, 16)])
async def test_tokens_equal_an_undisturbed_engines(
    transport: str, block_sizes: tuple[int, int]
) -> None:
    """The second time the receiver finds KV and is sent the rest with the state; the sender goes on
    from a state that it kept."""
    async with (
        pair(transport, block_sizes=block_sizes, state_positions=STATE, num_blocks=256) as world,
        router(world) as end,
    ):
        for number in range(2):
            one = attempt(n=3, number=number)
            handover_id = new_id()
            await end.start(one, handover_id)
            answer = await world.run(one, handover_id)
            assert await end.ended(one) == reference(one, STATE)
            started, size = end.started[one.key], len(one.token_ids)
            assert started.received_bytes == 16 * (size - started.cached_tokens + STATE)
            if number:
                assert started.cached_tokens == size // block_sizes[1] * block_sizes[1]
                every = lcm(block_sizes[0], UNIT_TOKENS)
                assert answer.cached_tokens == (size - 1) // every * every
            else:
                assert started.cached_tokens == answer.cached_tokens == 0


async def test_a_sequence_leaves_with_its_state() -> None:
    # Few KV chunks: one staging pool is that of both ends.
    one = attempt("leaves", size=90, n=2, max_tokens=300)
    expected = reference(one, STATE)
    assert all(POISON not in tokens for tokens in expected.values())
    async with (
        pair(state_positions=STATE, num_blocks=512) as world,
        router(world) as end,
    ):
        runner = world.decode.runner
        runner.hold()
        runner.allow(20)
        await end.start(one)
        await until(lambda: all(len(end.tokens[key]) >= 5 for key in keys_of(one)))
        heirs = []
        for number, key in enumerate(keys_of(one), 1):
            handover_id = new_id()
            await end.hand_over(key, handover_id)

            def answered(key: object = key) -> bool:
                runner.allow(1)
                return key in end.migrated_out

            await until(answered)
            ids = (*one.token_ids, *end.tokens[key][:-1])
            heirs.append(replace(one, attempt=number, choices=(key.choice,), token_ids=ids))
            await end.start(heirs[-1], handover_id, sender=world.decode.identity)
        runner.open()
        for heir in heirs:
            (choice,) = heir.choices
            rest = (await end.ended(heir))[choice]
            assert expected[choice][: heir.position] + rest == expected[choice]
            started = end.started[heir.key]
            sent = len(heir.token_ids) - started.cached_tokens + STATE
            assert started.received_bytes == 16 * sent


def held_at_the_state(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> tuple[threading.Event, threading.Event]:
    """Copies of the state, by `pack` or `unpack`, stop until they may go on: (one has begun, they
    may go on)."""
    begun, may_end = threading.Event(), threading.Event()

    def copy(
        runner: GatedRunner, extents: Extents, first_position: int, count: int, part: memoryview
    ) -> None:
        if first_position < STATE:
            begun.set()
            assert may_end.wait(PATIENCE_S)
        getattr(FakeRunner, name)(runner, extents, first_position, count, part)

    monkeypatch.setattr(GatedRunner, "copies_beside_steps", True)
    monkeypatch.setattr(GatedRunner, name, copy)
    return begun, may_end


@pytest.mark.parametrize("name", ["pack", "unpack"])
async def test_a_cancel_while_the_state_is_copied_frees_all_when_that_is_done(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attempt()
    async with (
        pair(state_positions=STATE, num_blocks=256) as world,
        router(world) as end,
    ):
        begun, may_end = held_at_the_state(monkeypatch, name)
        handover_id = new_id()
        try:
            await end.start(one, handover_id)
            run = world.run(one, handover_id)
            await until(begun.is_set)
            await end.cancel(one)
            await world.cancel_prefill(one)
            await until(lambda: one.key not in world.decoding.attempts)
            worker = world.prefill if name == "pack" else world.decode
            assert not await worker.is_idle(), "its blocks are being copied"
        finally:
            may_end.set()
        await run
        await world.settle()
        # What comes next finds nothing of it.
        after = attempt("after", size=600, seed=1)
        handover_id = new_id()
        await end.start(after, handover_id)
        await world.run(after, handover_id)
        assert await end.ended(after) == reference(after, STATE)


async def test_a_prompt_without_its_state_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = attempt()
    async with (
        pair(state_positions=STATE, num_blocks=256) as world,
        router(world) as end,
    ):
        begun, may_end = held_at_the_state(monkeypatch, "pack")
        handover_id = new_id()
        try:
            await end.start(one, handover_id)
            run = world.run(one, handover_id)
            await until(begun.is_set)
            await until(lambda: world.decode.stats.payload_bytes == 16 * len(one.token_ids))
            await world.cancel_prefill(one)
        finally:
            may_end.set()
        await run
        await end.failed(one)
        assert not end.tokens[keys_of(one)[0]]


async def test_a_worker_whose_model_has_another_state_is_refused() -> None:
    async with pair(state_positions=STATE) as world:
        layout = world.receiver.layout
        for other in (0, STATE + 1):
            world.sender.layout = replace(layout, state_positions=other)
            with pytest.raises(Incompatible, match=f"state_positions: {other} against {STATE}"):
                await world.receiver.meet(world.prefill.identity)
