"""The whole path over two workers: what decode streams equals one undisturbed engine's tokens."""

from __future__ import annotations

import asyncio

import pytest

from batonlm.core.errors import HandoverFailed
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.rpc.convert import choice_tokens_from_proto
from batonlm.rpc.metrics import KV_SOURCE, counter
from batonlm.transfer import nixl
from tests.services.worker.pair import PATIENCE_S, attempt, keys_of, new_id, pair, reference
from tests.services.worker.router_end import router

TRANSPORTS = [
    "loopback",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl.available(), reason="no NIXL here")),
]


def kv_source(source: str) -> float:
    value: float = counter(KV_SOURCE).labels(source)._value.get()
    return value


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block_sizes", [(16, 16), (8, 32), (24, 16)])
async def test_tokens_equal_an_undisturbed_engines(
    transport: str, block_sizes: tuple[int, int]
) -> None:
    one = attempt(n=3)
    before = kv_source("handover")
    async with pair(transport, block_sizes=block_sizes) as world, router(world) as end:
        handover_id = new_id()
        await end.start(one, handover_id)
        answer = await world.run(one, handover_id)
        assert await end.ended(one) == reference(one)
        first = [choice_tokens_from_proto(entry) for entry in answer.choices]
        assert {t.key.choice: list(t.token_ids) for t in first} == {
            choice: ids[:1] for choice, ids in reference(one).items()
        }
        started = end.started[one.key]
        assert started.received_bytes == 16 * len(one.token_ids) and started.cached_tokens == 0
        assert kv_source("handover") == before + 1


@pytest.mark.deep
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 32), (32, 16), (24, 16), (16, 24)])
async def test_prefixes_are_found_on_both_sides_and_not_moved_again(
    transport: str, block_sizes: tuple[int, int]
) -> None:
    """What decode holds ends with a block of its own, inside a block of prefill's."""
    async with pair(transport, block_sizes=block_sizes) as world, router(world) as end:
        moved = []
        for number, size in enumerate((500, 600, 600)):
            one = attempt("r", size=size, number=number)
            handover_id = new_id()
            await end.start(one, handover_id)
            answer = await world.run(one, handover_id)
            assert await end.ended(one) == reference(one)
            started = end.started[one.key]
            moved.append(started.received_bytes)
            assert started.received_bytes == 16 * (size - started.cached_tokens)
            assert started.cached_tokens % block_sizes[1] == 0
            assert (answer.cached_tokens > 0) == (number > 0)
        assert moved[0] == 16 * 500 and 0 < moved[1] < 16 * 150 and moved[2] < 16 * block_sizes[1]
        assert world.decode.stats.payload_bytes == world.prefill.stats.payload_bytes == sum(moved)


async def test_an_input_that_is_all_cached_moves_nothing_and_says_so() -> None:
    before = kv_source("cache")
    async with pair() as world, router(world) as end:
        for number in range(2):
            one = attempt(size=512, number=number)
            handover_id = new_id()
            await end.start(one, handover_id)
            await world.run(one, handover_id)
            assert await end.ended(one) == reference(one)
        assert end.started[one.key].received_bytes == 0
        assert end.started[one.key].cached_tokens == 512
        assert kv_source("cache") == before + 1


async def test_an_input_can_be_prefilled_on_decode() -> None:
    one, before = attempt(n=2, greedy=True), kv_source("local")
    async with pair() as world, router(world) as end:
        await end.start(one)
        assert await end.ended(one) == reference(one)
        assert end.started[one.key].received_bytes == 0
        assert kv_source("local") == before + 1


async def test_a_second_attempt_goes_on_from_accepted_tokens() -> None:
    whole = attempt(max_tokens=20)
    tokens = reference(whole)[0]
    rest = attempt(max_tokens=20, number=1, accepted=tuple(tokens[:7]))
    async with pair() as world, router(world) as end:
        handover_id = new_id()
        await end.start(rest, handover_id)
        await world.run(rest, handover_id)
        assert await end.ended(rest) == {0: tokens[7:]}
        assert end.firsts[keys_of(rest)[0]] == 7


async def test_many_attempts_of_two_routers_at_once() -> None:
    # Room for all at once: who is refused for want of it would depend on timing.
    async with pair(num_blocks=512) as world, router(world) as one_end, router(world) as other_end:
        attempts = [
            attempt(f"r{i}", size=40 + 37 * i, seed=i, n=1 + i % 2, max_tokens=3 + i)
            for i in range(12)
        ]

        async def serve(number: int) -> None:
            one, end = attempts[number], (one_end, other_end)[number % 2]
            if number % 3 == 0:
                await end.start(one)
                return
            handover_id = new_id()
            await end.start(one, handover_id)
            await world.run(one, handover_id)

        await asyncio.gather(*(serve(number) for number in range(len(attempts))))
        for number, one in enumerate(attempts):
            assert await (one_end, other_end)[number % 2].ended(one) == reference(one)


@pytest.mark.parametrize("token_ids", [(), (-1,), (1, 2), (2**31 - 1,)], ids=str)
async def test_tokens_that_do_not_fit_are_the_senders_fault(token_ids: tuple[int, ...]) -> None:
    """Then the KV is computed elsewhere; nothing is wrong with the client's request."""
    one = attempt()

    async def pack(first_position: int, count: int, out: memoryview) -> None:
        out[:] = bytes(len(out))

    async with pair() as world, router(world) as end:
        handover_id = new_id()
        size, receiver = len(one.token_ids), world.decode.identity.instance_id
        offer = world.sender.offer(handover_id, receiver, size, pack, deadline_s=PATIENCE_S)
        offer.announce()
        offer.advance(size)
        (key,) = keys_of(one)
        offer.tokens([ChoiceTokens(key, 0, token_ids)])
        await end.start(one, handover_id)
        assert isinstance(await end.failed(one), HandoverFailed)
