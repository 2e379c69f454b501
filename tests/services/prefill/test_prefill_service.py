"""Prefill's side of an attempt: token 0, what is kept for whom and until when."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.attempt import Attempt
from batonlm.core.routing.load import WorkerState
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.grammar.book import GrammarBook
from batonlm.prefill.service import LIVE_S, MAX_KNOWN, LiveReceivers
from batonlm.rpc.convert import choice_tokens_from_proto
from batonlm.rpc.metrics import CACHED_TOKENS, PREFILL_TOKENS, REGISTRY
from batonlm.testing.fake_runner import FakeRunner
from batonlm.transfer import nixl
from batonlm.v1 import prefill_pb2
from batonlm.worker import service as worker_service
from tests.services.worker.pair import (
    PATIENCE_S,
    POISON,
    GatedRunner,
    attempt,
    new_id,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import router


def firsts(answer: prefill_pb2.RunResponse) -> dict[int, list[int]]:
    made = [choice_tokens_from_proto(entry) for entry in answer.choices]
    return {tokens.key.choice: list(tokens.token_ids) for tokens in made}


def counted() -> tuple[float, float]:
    computed, cached = map(REGISTRY.get_sample_value, (PREFILL_TOKENS.name, CACHED_TOKENS.name))
    return computed or 0.0, cached or 0.0


async def code_of(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return refused.value.code()


async def test_one_token_needs_no_decode_worker() -> None:
    one = attempt(n=3, max_tokens=1)
    computed, cached = counted()
    async with pair() as world:
        assert firsts(await world.run(one)) == reference(one)
        assert counted() == (computed + 600, cached)
        again = await world.run(attempt(n=3, max_tokens=1, number=1))
        assert firsts(again) == reference(one)
        assert again.cached_tokens > 0
        assert counted() == (computed + 1200 - again.cached_tokens, cached + again.cached_tokens)


async def test_nothing_is_moved_when_token_0_ends_every_choice() -> None:
    tokens = reference(attempt(n=2, size=100))
    stops = tuple(ids[0] for ids in tokens.values())
    one = attempt(n=2, size=100, stop_token_ids=stops)
    async with pair() as world, router(world) as end:
        handover_id = new_id()
        await end.start(one, handover_id)
        answer = await world.run(one, handover_id)
        assert firsts(answer) == {choice: ids[:1] for choice, ids in tokens.items()}
        # Decode has reserved and would take KV now if there were any.
        await until(lambda: all(offer.granted for offer in world.sender._offers.values()))
        silent = end.num_heartbeats
        await until(lambda: end.num_heartbeats > silent + 1)
        assert world.sender.num_offers == 1
        # What the router does when it has the answer.
        await end.cancel(one)
        await world.cancel_prefill(one)
        await world.settle()
        assert world.prefill.stats.payload_bytes == world.decode.stats.payload_bytes == 0
        assert not end.failures


async def test_kv_that_nobody_comes_for_is_not_kept_for_ever() -> None:
    one = attempt()
    async with pair() as world:
        assert firsts(await world.run(one, new_id())) == {0: reference(one)[0][:1]}
        assert world.prefilling.num_attempts == 1
        await world.cancel_prefill(one)
    async with pair(handover_timeout_s=0.3) as world:
        assert firsts(await world.run(one, new_id())) == {0: reference(one)[0][:1]}
        await world.settle()


@pytest.mark.parametrize("keep", [False, True])
async def test_an_answer_that_nobody_waits_for_any_more_is_not_computed(keep: bool) -> None:
    one, other = attempt(), attempt("other", seed=2)
    async with pair() as world:
        world.prefill.runner.hold()
        calls = [world.run(each, new_id() if keep else b"") for each in (one, other)]
        await until(lambda: world.prefilling.num_attempts == 2)
        await until(lambda: world.prefill.runner.num_begun == 1)
        for call in calls:
            call.cancel()
        await until(lambda: world.prefilling.num_attempts == 0)
        await world.settle()
        # The step that was under way, and nothing after it.
        assert world.prefill.runner.num_done == 1


async def test_cancel_ends_the_call_and_frees_the_blocks() -> None:
    one = attempt()
    async with pair() as world:
        world.prefill.runner.hold()
        call = world.run(one, new_id())
        await until(lambda: world.prefill.runner.num_begun == 1)
        await world.cancel_prefill(one)
        assert await code_of(call) is grpc.StatusCode.CANCELLED
        await world.cancel_prefill(attempt("never heard of"))


async def test_what_is_cancelled_while_its_grammar_compiles_gets_no_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling, compiled = asyncio.Event(), asyncio.Event()

    async def compile_slowly(book: GrammarBook, grammar: object) -> None:
        compiling.set()
        await compiled.wait()

    monkeypatch.setattr(GrammarBook, "compiled", compile_slowly)
    one = attempt()
    async with pair() as world:
        call = world.run(one, new_id())
        async with asyncio.timeout(60):
            await compiling.wait()
        await world.cancel_prefill(one)
        await until(lambda: world.sender.num_offers == 0)
        compiled.set()
        assert await code_of(call) is grpc.StatusCode.CANCELLED
        await world.settle()
        assert world.prefill.runner.num_begun == 0


async def test_what_is_done_before_an_attempt_is_queued_counts_towards_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued: list[float | None] = []
    add = Scheduler.add

    async def compile_slowly(book: GrammarBook, grammar: object) -> None:
        await asyncio.sleep(0.25)

    def note(scheduler: Scheduler, attempt: Attempt, *args: Any, **options: Any) -> None:
        queued.append(attempt.remaining_s)
        add(scheduler, attempt, *args, **options)

    monkeypatch.setattr(GrammarBook, "compiled", compile_slowly)
    monkeypatch.setattr(Scheduler, "add", note)
    async with pair() as world:
        await world.run(attempt(max_tokens=1, remaining_s=60.0))
        (remaining_s,) = queued
        assert remaining_s is not None and remaining_s < 59.8


async def test_a_cancel_that_overtakes_its_call_counts() -> None:
    one = attempt()
    async with pair() as world:
        await world.cancel_prefill(one)
        assert await code_of(world.run(one, new_id())) is grpc.StatusCode.CANCELLED
        assert not world.prefilling.num_attempts


async def test_blocks_of_a_cancelled_prompt_stay_while_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing, may_end = threading.Event(), threading.Event()

    def pack(
        runner: GatedRunner, extents: Extents, first_position: int, count: int, out: memoryview
    ) -> None:
        packing.set()
        assert may_end.wait(PATIENCE_S)
        FakeRunner.pack(runner, extents, first_position, count, out)

    monkeypatch.setattr(GatedRunner, "copies_beside_steps", True)
    monkeypatch.setattr(GatedRunner, "pack", pack)
    one = attempt()
    async with pair() as world, router(world) as end:
        world.prefill.runner.hold()
        handover_id = new_id()
        await end.start(one, handover_id)
        call = world.run(one, handover_id)
        world.prefill.runner.allow(1)
        try:
            assert await asyncio.to_thread(packing.wait, PATIENCE_S)
            await world.cancel_prefill(one)
            assert await code_of(call) is grpc.StatusCode.CANCELLED
            world.prefill.runner.open()
            free = await world.prefill.engine.call(lambda loop: loop.scheduler.load.free_blocks)
            assert free < world.prefill.runner.num_blocks
        finally:
            may_end.set()


async def test_out_of_time_while_computing() -> None:
    async with pair() as world:
        world.prefill.runner.hold()
        call = world.run(attempt(remaining_s=0.1), new_id())
        assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: world.prefilling.num_attempts == 0)


async def test_broken_logits_fail_the_attempt_and_its_handover() -> None:
    one = attempt(size=200, last_token=POISON)
    async with pair() as world, router(world) as end:
        handover_id = new_id()
        await end.start(one, handover_id)
        assert await code_of(world.run(one, handover_id)) is grpc.StatusCode.INTERNAL
        assert (await end.failed(one)).retryable


async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = attempt(max_tokens=1)
    async with pair() as world:
        world.prefill.runner.hold()
        call = world.run(one)
        await until(lambda: world.prefilling.num_attempts == 1)
        assert await code_of(world.run(one)) is grpc.StatusCode.INVALID_ARGUMENT
        monkeypatch.setattr(worker_service, "MAX_ATTEMPTS", 1)
        other = attempt("other", max_tokens=1)
        assert await code_of(world.run(other)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        monkeypatch.undo()
        malformed = prefill_pb2.RunRequest(handover_id=b"short")
        run = world.prefill_stub.Run
        assert await code_of(run(malformed)) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(run(prefill_pb2.RunRequest())) is grpc.StatusCode.INVALID_ARGUMENT
        stale = prefill_pb2.RunRequest(prefill_instance_id="an older one")
        assert await code_of(run(stale)) is grpc.StatusCode.UNAVAILABLE
        world.prefill.runner.open()
        assert firsts(await call) == reference(one)


async def test_a_handover_id_is_used_once() -> None:
    handover_id = new_id()
    async with pair(handover_timeout_s=0.3) as world:
        await world.run(attempt("one", size=20), handover_id)
        again = world.run(attempt("two", size=20), handover_id)
        assert await code_of(again) is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: world.prefilling.num_attempts == 0)


async def test_a_drain_answers_and_hands_over_what_is_here() -> None:
    one, new = attempt(), attempt("new")
    async with pair() as world, router(world) as end:
        world.prefill.runner.hold()
        handover_id = new_id()
        call = world.run(one, handover_id)
        await until(lambda: world.prefill.runner.num_begun == 1)
        draining = asyncio.create_task(world.prefilling.drain())
        await until(lambda: world.prefilling.state is WorkerState.DRAINING)
        assert await code_of(world.run(new)) is grpc.StatusCode.UNAVAILABLE
        world.prefill.runner.open()
        assert firsts(await call) == {0: reference(one)[0][:1]}
        assert world.prefilling.state is WorkerState.KV_ONLY
        assert not draining.done()
        await end.start(one, handover_id)
        async with asyncio.timeout(PATIENCE_S):
            await draining
        assert await end.ended(one) == reference(one)


@pytest.mark.skipif(not nixl.available(), reason="no NIXL here")
async def test_closing_ends_a_handover_in_the_middle() -> None:
    one = attempt()
    async with pair("nixl") as world, router(world) as end:
        world.prefill.runner.hold()
        handover_id = new_id()
        await end.start(one, handover_id)
        call = world.run(one, handover_id)
        world.prefill.runner.allow(1)
        await until(lambda: world.prefill.runner.num_begun == 2)
        closing = asyncio.create_task(world.prefilling.close())
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        world.prefill.runner.open()
        async with asyncio.timeout(PATIENCE_S):
            await closing
        assert (await end.failed(one)).retryable
        assert world.sender.num_offers == 0


async def test_the_share_of_the_pool_follows_the_decode_workers_that_collect() -> None:
    async with pair(handover_timeout_s=0.3) as world:
        shares = []
        for number, instance_id in enumerate(("a", "b", "b", "c")):
            one = attempt(f"r{number}", size=20)
            await world.prefilling.run(one, new_id(), instance_id)
            shares.append(
                await world.prefill.engine.call(lambda loop: loop.scheduler.live_receivers)
            )
        assert shares == [1, 2, 2, 3]
        await world.prefilling.run(attempt("local", size=20), b"", "")
        assert await world.prefill.engine.call(lambda loop: loop.scheduler.live_receivers) == 3


def test_decode_workers_that_were_not_named_for_a_minute_do_not_count() -> None:
    live = LiveReceivers()
    assert [live.saw(name, now) for name, now in (("a", 0.0), ("b", 1.0), ("a", 50.0))] == [1, 2, 2]
    assert live.saw("c", 1.5 + LIVE_S) == 2
    assert live.saw("c", 1000.0) == 1
    assert [live.saw(str(i), 1000.0) for i in range(2 * MAX_KNOWN)][-1] == MAX_KNOWN
