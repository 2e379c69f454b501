"""Sequences whose router is gone, or that another one wants: adopted at any point, or dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from batonlm.core.errors import Reason
from batonlm.core.handover.table import HANDOVER_ID_BYTES
from batonlm.core.request.attempt import Attempt, Logprobs
from batonlm.core.request.request import StopParams
from batonlm.core.request.resumption import adoption_id
from batonlm.rpc.metrics import (
    ADOPTIONS_REFUSED,
    DECODE_TOKENS,
    ORPHANS_TOTAL,
    PREFILL_TOKENS,
    counter,
)
from tests.services.worker.pair import PATIENCE_S, Pair, attempt, keys_of, pair, reference, until
from tests.services.worker.router_end import RouterEnd, router

SIZE = 40


def prefilled() -> float:
    value: float = counter(PREFILL_TOKENS)._value.get()
    return value


def sampled() -> float:
    value: float = counter(DECODE_TOKENS)._value.get()
    return value


def orphans(outcome: str) -> float:
    value: float = counter(ORPHANS_TOTAL).labels(outcome)._value.get()
    return value


def refused(reason: str) -> float:
    value: float = counter(ADOPTIONS_REFUSED).labels(reason)._value.get()
    return value


def ids_of(one: Attempt, tenant: str = "tenant") -> list[bytes]:
    return [adoption_id(tenant, "stream", choice) for choice in one.choices]


def adopting(one: Attempt, choice: int, request_id: str = "new") -> Attempt:
    """The attempt of another router's request that goes on with a choice."""
    prompt = one.token_ids[: one.num_prompt_tokens]
    return replace(one, request_id=request_id, attempt=choice, choices=(choice,), token_ids=prompt)


async def adopt(end: RouterEnd, one: Attempt, choice: int, request_id: str = "new") -> Attempt:
    """The engine does it between two steps."""
    new = adopting(one, choice, request_id)
    await end.start(new, adoption_ids=ids_of(new), adopts=True)
    return new


async def steps_until(world: Pair, condition: Callable[[], bool]) -> None:
    """Lets the engine run, which is held, step by step."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            world.decode.runner.allow(1)
            await asyncio.sleep(0.01)


async def begun(world: Pair, end: RouterEnd, one: Attempt, tokens: int) -> None:
    """The router is lost when each choice has so many tokens, or has ended."""
    world.decode.runner.hold()
    await end.start(one, adoption_ids=ids_of(one))
    keys = keys_of(one)
    await steps_until(
        world, lambda: all(len(end.tokens[key]) >= tokens or key in end.ends for key in keys)
    )
    await end.break_off()


@pytest.mark.parametrize(
    ("tokens", "late", "logprobs"),
    [
        pytest.param(*(tokens, late, logprobs), marks=[pytest.mark.deep] if deep else [])
        for tokens in (1, 2, 7, 11, 12)
        for late in (False, True)
        for logprobs in (None, 2)
        for deep in ((late and logprobs) or (tokens in (2, 11) and (late or logprobs)),)
    ],
)
async def test_another_router_goes_on_at_any_point(
    tokens: int, late: bool, logprobs: int | None
) -> None:
    """late: after the resume window."""
    one = attempt(size=SIZE, n=2)
    one = replace(one, sampling=replace(one.sampling, top_logprobs=logprobs))
    window = 0.1 if late else 30.0
    async with pair(resume_window_s=window) as world, router(world) as old, router(world) as new:
        before, computed, made = orphans("adopted"), prefilled(), sampled()
        await begun(world, old, one, tokens)
        if late:
            await until(lambda: world.decoding.num_orphans == 2)
        await until(lambda: set(world.decoding.orphans) == set(ids_of(one)))
        adopted = [await adopt(new, one, choice) for choice in one.choices]
        world.decode.runner.open()
        for each in adopted:
            (choice,) = each.choices
            assert await new.ended(each) == {choice: reference(one)[choice]}
        assert orphans("adopted") == before + 2
        assert prefilled() == computed + SIZE, "the prompt was computed once"
        assert sampled() == made + 24, "and each token"
        assert world.decoding.orphans == ()


async def test_the_old_router_has_no_say_any_more() -> None:
    one = attempt(size=SIZE, max_tokens=30)
    (key,) = keys_of(one)
    async with pair() as world, router(world) as old, router(world) as new:
        await begun(world, old, one, 3)
        await until(lambda: bool(world.decoding.orphans))
        adopted = await adopt(new, one, 0)
        await steps_until(world, lambda: len(new.tokens[keys_of(adopted)[0]]) >= 3)
        await old.connect(old.next_positions())
        assert old.lost == [key]
        await old.cancel(one)
        await old.confirm(key, 5)
        await old.hand_over(key, b"h" * 16)
        await until(lambda: key in old.migrated_out)
        assert old.migrated_out[key] == (b"h" * 16, None)
        world.decode.runner.open()
        assert await new.ended(adopted) == reference(one)
        assert len(old.tokens[key]) < 30


async def test_a_router_that_is_there_keeps_what_is_its_own() -> None:
    one = attempt(size=SIZE, max_tokens=30)
    async with pair() as world, router(world) as old, router(world) as new:
        await begun(world, old, one, 3)
        await until(lambda: bool(world.decoding.orphans))
        await old.connect(old.next_positions())
        assert not old.lost and not world.decoding.orphans
        before = refused("gone")
        await adopt(new, one, 0)
        await until(lambda: bool(new.failures))
        assert new.failures.pop()[2].reason is Reason.HANDOVER_FAILED
        assert refused("gone") == before + 1
        world.decode.runner.open()
        assert await old.ended(one) == reference(one)


@pytest.mark.parametrize("tokens", [1, 7, 12])
async def test_a_router_that_is_there_loses_what_another_one_wants(tokens: int) -> None:
    """It may hang, or be cut off from its clients. When it goes on, it learns that it lost it."""
    one = attempt(size=SIZE, n=2)
    async with pair() as world, router(world) as old, router(world) as new:
        computed, made = prefilled(), sampled()
        world.decode.runner.hold()
        await old.start(one, adoption_ids=ids_of(one))
        first, second = keys_of(one)
        await steps_until(
            world,
            lambda: all(len(old.tokens[k]) >= tokens or k in old.ends for k in (first, second)),
        )
        assert world.decoding.orphans == ()
        await new.want(*ids_of(one)[:1], b"of a stranger...")
        await until(lambda: world.decoding.orphans == tuple(ids_of(one)[:1]))
        adopted = await adopt(new, one, 0)
        await until(lambda: bool(old.failures))
        whole, choices, error = old.failures.pop()
        assert (whole, choices, error.reason) == (one.key, (0,), Reason.HANDOVER_FAILED)
        assert old.adopted == [one.key] and not new.adopted
        # It may say what it likes of that choice, and keeps the other one.
        await old.cancel(one, 0)
        await old.confirm(first, 5)
        world.decode.runner.open()
        assert await new.ended(adopted) == {0: reference(one)[0]}
        await until(lambda: second in old.ends)
        assert old.tokens[second] == reference(one)[1]
        assert prefilled() == computed + SIZE and sampled() == made + 24
        assert world.decoding.orphans == ()


async def test_log_probabilities_of_one_that_had_moved_are_all_there() -> None:
    """Those of the tokens with which it began came with its attempt."""
    one = attempt(size=SIZE, max_tokens=30)
    one = replace(one, sampling=replace(one.sampling, top_logprobs=2))
    (key,) = keys_of(one)
    async with pair() as world, router(world) as first:
        await first.start(one)
        await first.ended(one)
        tokens, scores = first.tokens[key], first.logprobs[key]
    later = replace(one, attempt=1, token_ids=(*one.token_ids, *tokens[:5]))
    (key,) = keys_of(later)
    async with pair() as world, router(world) as old, router(world) as new:
        world.decode.runner.hold()
        await old.start(later, adoption_ids=ids_of(one), logprobs=scores[:5])
        await steps_until(world, lambda: len(old.tokens[key]) >= 3)
        await old.break_off()
        await until(lambda: bool(world.decoding.orphans))
        adopted = await adopt(new, one, 0)
        world.decode.runner.open()
        assert await new.ended(adopted) == {0: tokens}
        assert new.logprobs[keys_of(adopted)[0]] == scores
    async with pair() as world, router(world) as old:
        await old.start(later, adoption_ids=ids_of(one))
        await old.ended(later)
        await old.break_off()
        assert not world.decoding.orphans, "some are not known"


@pytest.mark.parametrize("top", [None, 2])
async def test_the_tokens_of_one_that_has_not_begun_are_there(top: int | None) -> None:
    """It was to begin behind what another worker, which is gone, had sampled."""
    one = attempt(size=SIZE, max_tokens=30)
    one = replace(one, sampling=replace(one.sampling, top_logprobs=top))
    tokens = reference(one)[0]
    scores = [Logprobs(-1.0, ((each, -1.0),)) for each in tokens[:5]] if top else []
    later = replace(one, attempt=1, token_ids=(*one.token_ids, *tokens[:5]))
    async with pair(resume_window_s=30.0) as world, router(world) as old, router(world) as new:
        # Nobody offers this KV.
        lost = b"h" * HANDOVER_ID_BYTES
        await old.start(later, lost, adoption_ids=ids_of(one), logprobs=scores)
        await until(lambda: world.decoding.num_attempts == 1)
        await old.break_off()
        await until(lambda: world.decoding.orphans == tuple(ids_of(one)))
        adopted = await adopt(new, one, 0)
        assert (await new.failed(adopted)).reason is Reason.HANDOVER_FAILED
        (key,) = keys_of(adopted)
        assert new.tokens[key] == tokens[:5] and new.logprobs[key] == scores
        assert not world.decoding.orphans and not world.decoding.num_attempts
        again = replace(later, request_id="new")
        new.failures.clear()
        await new.start(again, adoption_ids=ids_of(one), logprobs=scores)
        assert await new.ended(again) == {0: tokens[5:]}


async def test_of_two_routers_one_gets_it() -> None:
    one = attempt(size=SIZE, max_tokens=30)
    async with (
        pair() as world,
        router(world) as old,
        router(world) as first,
        router(world) as second,
    ):
        await begun(world, old, one, 3)
        await until(lambda: bool(world.decoding.orphans))
        adopted = await adopt(first, one, 0, "first")
        await steps_until(world, lambda: bool(first.tokens[keys_of(adopted)[0]]))
        await adopt(second, one, 0, "second")
        await until(lambda: bool(second.failures))
        assert second.failures.pop()[2].reason is Reason.HANDOVER_FAILED
        # When the first one is lost, too, the second one may have it.
        await first.break_off()
        await until(lambda: bool(world.decoding.orphans))
        again = await adopt(second, one, 0, "third")
        world.decode.runner.open()
        assert await second.ended(again) == reference(one)


CHANGES: dict[str, Callable[[Attempt], Attempt]] = {
    "another prompt": lambda one: replace(one, token_ids=(*one.token_ids[:-1], 5)),
    "a longer one": lambda one: replace(
        one, token_ids=(*one.token_ids, 5), num_prompt_tokens=SIZE + 1
    ),
    "another seed": lambda one: replace(one, sampling=replace(one.sampling, seed=9)),
    "another end": lambda one: replace(one, stop=replace(one.stop, max_tokens=29)),
    "another adapter": lambda one: replace(one, adapter="a"),
    "another salt": lambda one: replace(one, cache_salt=b"a"),
    "another choice": lambda one: replace(one, choices=(1,)),
    "log-probabilities": lambda one: replace(one, sampling=replace(one.sampling, top_logprobs=1)),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_another_request_adopts_nothing(change: str) -> None:
    one = attempt(size=SIZE, max_tokens=30)
    async with pair() as world, router(world) as old, router(world) as new:
        await begun(world, old, one, 3)
        await until(lambda: bool(world.decoding.orphans))
        before = refused("differs")
        other = CHANGES[change](adopting(one, 0, "other"))
        await new.start(other, adoption_ids=ids_of(one), adopts=True)
        await until(lambda: bool(new.failures))
        assert new.failures.pop()[2].reason is Reason.HANDOVER_FAILED
        assert refused("differs") == before + 1
        adopted = await adopt(new, one, 0)
        world.decode.runner.open()
        assert await new.ended(adopted) == reference(one)


async def test_another_tenant_finds_nothing() -> None:
    one = attempt(size=SIZE, max_tokens=30)
    async with pair() as world, router(world) as old, router(world) as new:
        await begun(world, old, one, 3)
        await until(lambda: bool(world.decoding.orphans))
        stranger = adopting(one, 0, "stranger")
        await new.start(stranger, adoption_ids=ids_of(one, "another"), adopts=True)
        await until(lambda: bool(new.failures))
        assert new.failures.pop()[2].reason is Reason.HANDOVER_FAILED
        assert set(world.decoding.orphans) == set(ids_of(one))
        world.decode.runner.open()
        await new.break_off()
        await old.connect({})


async def test_nothing_is_held_when_the_time_is_over() -> None:
    """What waits for its router, and what has ended meanwhile."""
    long = attempt("long", size=SIZE, max_tokens=300)
    short = attempt("short", size=SIZE, seed=2, n=2, max_tokens=3)
    async with pair(resume_window_s=0.1, orphan_s=0.4) as world, router(world) as old:
        before, kept = orphans("expired"), orphans("kept")
        world.decode.runner.hold()
        for one in (long, short):
            ids = [adoption_id("tenant", one.request_id, choice) for choice in one.choices]
            await old.start(one, max_unconfirmed=4, adoption_ids=ids)
        await steps_until(world, lambda: all(len(ids) >= 1 for ids in old.tokens.values()))
        await old.break_off()
        await until(lambda: world.decoding.num_orphans == 3)
        world.decode.runner.open()
        await until(lambda: not world.decoding.num_orphans)
        assert not world.decoding.num_attempts and not world.decoding.sessions
        assert orphans("expired") == before + 3 and orphans("kept") == kept + 3


async def test_nothing_is_kept_where_no_router_may_adopt_it() -> None:
    """Without ids, without time, and before the first token."""
    one = attempt(size=SIZE, max_tokens=300)
    for seconds, ids in ((30.0, []), (0.0, ids_of(one))):
        async with pair(resume_window_s=0.2, orphan_s=seconds) as world, router(world) as old:
            world.decode.runner.hold()
            await old.start(one, adoption_ids=ids)
            await steps_until(world, lambda: bool(old.tokens[keys_of(one)[0]]))
            await old.break_off()
            assert not world.decoding.orphans
            await until(lambda: not world.decoding.num_attempts)
            assert not world.decoding.num_orphans
    async with pair(resume_window_s=0.2) as world, router(world) as old:
        world.decode.runner.hold()
        await old.start(one, adoption_ids=ids_of(one))
        await until(lambda: world.decode.runner.num_begun == 1)
        await old.break_off()
        await until(lambda: not world.decoding.num_attempts)
        assert not world.decoding.num_orphans


async def test_a_draining_worker_keeps_nothing_for_others() -> None:
    one = attempt(size=SIZE, max_tokens=300)
    async with pair(resume_window_s=0.1) as world, router(world) as old:
        await begun(world, old, one, 3)
        await until(lambda: world.decoding.num_orphans == 1)
        world.decode.runner.open()
        await world.decoding.drain()
        assert not world.decoding.num_orphans


async def test_they_have_a_tenth_of_the_blocks_and_go_first() -> None:
    """128 blocks of 16: one of 40 + 100 positions needs nine."""
    stop = StopParams(100, ignore_eos=True)
    many = [replace(attempt(f"r{seed}", size=SIZE, seed=seed), stop=stop) for seed in range(3)]
    async with (
        pair(resume_window_s=0.1, num_blocks=128) as world,
        router(world) as old,
        router(world) as new,
    ):
        dropped = orphans("dropped")
        world.decode.runner.hold()
        for number, one in enumerate(many):
            await old.start(one, adoption_ids=[adoption_id("tenant", f"s{number}", 0)])
        await steps_until(world, lambda: all(old.tokens[keys_of(one)[0]] for one in many))
        await old.break_off()
        await until(lambda: world.decoding.num_orphans == 3)
        await steps_until(world, lambda: world.decoding.num_orphans == 1)
        assert orphans("dropped") == dropped + 2
        # This one needs all blocks.
        world.decode.runner.open()
        whole = attempt("whole", size=1900, seed=9, max_tokens=100)
        await new.start(whole)
        assert await new.ended(whole) == reference(whole)
        assert not world.decoding.num_orphans
        assert orphans("dropped") == dropped + 3


@pytest.mark.parametrize(
    "start",
    [
        {"adoption_ids": [b"short"]},
        {"adoption_ids": [b"x" * 16, b"y" * 16]},
        {"adopts": True},
    ],
)
async def test_ids_that_do_not_fit_end_only_their_attempt(start: dict[str, object]) -> None:
    one = attempt(size=SIZE)
    async with pair() as world, router(world) as end:
        await end.start(one, **start)  # type: ignore[arg-type]
        await until(lambda: bool(end.failures))
        assert end.failures.pop()[2].reason is Reason.INVALID_ARGUMENT


async def test_positions_that_were_confirmed_stay_so() -> None:
    """A sequence that waits for its router goes on when the next one has found no stop string."""
    one = attempt(size=SIZE, max_tokens=30)
    async with pair() as world, router(world) as old, router(world) as new:
        await old.start(one, max_unconfirmed=4, adoption_ids=ids_of(one))
        (key,) = keys_of(one)
        await until(lambda: len(old.tokens[key]) == 4)
        await old.confirm(key, 3)
        await until(lambda: len(old.tokens[key]) == 7)
        await old.break_off()
        await until(lambda: bool(world.decoding.orphans))
        adopted = await adopt(new, one, 0)
        (key,) = keys_of(adopted)
        await until(lambda: len(new.tokens[key]) == 7)
        await new.confirm(key, 30)
        while key not in new.ends:
            await new.confirm(key, len(new.tokens[key]))
            await until(lambda: new.ends.keys() == {key} or len(new.tokens[key]) > 7)
        assert new.tokens[key] == reference(one)[0]


def test_an_id_says_nothing_of_whose_it_is() -> None:
    ids = {
        adoption_id(tenant, stream, choice)
        for tenant in ("a", "b")
        for stream in ("c", "d")
        for choice in (0, 1)
    }
    assert len(ids) == 8 and {len(each) for each in ids} == {16}
