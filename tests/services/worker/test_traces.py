"""The spans of prefill and decode workers: below the attempt that asked, and all of them ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from batonlm.core.request.attempt import Attempt
from batonlm.rpc.tracing import Span
from tests.recorded import Recorded, is_below, seconds
from tests.services.worker.pair import attempt, keys_of, new_id, pair, until
from tests.services.worker.router_end import router


def asked(recorded: Recorded, one: Attempt) -> tuple[Attempt, Span]:
    """The attempt as a router asks for it, and the router's span of it."""
    span = recorded.tracer.begin("attempt")
    return replace(one, traceparent=span.context.traceparent), span


def outcome(span: ReadableSpan) -> object:
    return dict(span.attributes or {}).get("error.type")


async def test_both_workers_belong_to_the_attempt() -> None:
    recorded = Recorded()
    one, span = asked(recorded, attempt(n=2))
    async with pair(tracer=recorded.tracer) as world, router(world) as end:
        handover_id = new_id()
        await end.start(one, handover_id)
        await world.run(one, handover_id)
        await end.ended(one)
    span.end()
    parent = recorded.one("attempt")
    prefilled, decoded = recorded.one("prefill.run"), recorded.one("decode.run")
    assert is_below(prefilled, parent) and is_below(decoded, parent)
    queued, computed = recorded.one("prefill.queue"), recorded.one("prefill.compute")
    gave = recorded.one("handover.give")
    assert all(is_below(part, prefilled) for part in (queued, computed, gave))
    assert queued.end_time == computed.start_time
    collected, generated = recorded.one("handover.collect"), recorded.one("decode.generate")
    assert is_below(collected, decoded) and is_below(generated, decoded)
    assert seconds(collected) + seconds(generated) <= seconds(decoded)
    told = dict(collected.attributes or {})
    assert told == {"baton.cached_tokens": 0, "baton.transfer.bytes": 16 * len(one.token_ids)}
    assert {outcome(each) for each in recorded.spans} == {None}
    assert not recorded.open


async def test_decode_that_prefills_says_so() -> None:
    recorded = Recorded()
    one, span = asked(recorded, attempt())
    async with pair(tracer=recorded.tracer) as world, router(world) as end:
        await end.start(one)
        await end.ended(one)
    span.end()
    assert is_below(recorded.one("decode.prefill"), recorded.one("decode.run"))
    assert not recorded.named("handover.collect") and not recorded.open


async def test_a_sequence_that_moves_is_given() -> None:
    recorded = Recorded()
    one, span = asked(recorded, attempt(max_tokens=200))
    async with pair(tracer=recorded.tracer) as world, router(world) as end:
        runner = world.decode.runner
        runner.hold()
        runner.allow(20)
        await end.start(one)
        (key,) = keys_of(one)
        await until(lambda: len(end.tokens[key]) > 2)
        handover_id = new_id()
        await end.hand_over(key, handover_id)

        def answered() -> bool:
            runner.allow(1)
            return key in end.migrated_out

        await until(answered)
        runner.open()
        given, position = end.migrated_out[key]
        assert given == handover_id and position is not None
        output = tuple(end.tokens[key][: position - 1])
        other = replace(one, attempt=1, token_ids=(*one.token_ids, *output))
        await end.start(other, handover_id, sender=world.decode.identity)
        await end.ended(other)
    span.end()
    stayed, moved = recorded.named("decode.run")
    assert is_below(recorded.one("handover.give"), stayed)
    assert is_below(recorded.one("handover.collect"), moved)
    assert not recorded.open


async def test_a_cancelled_attempt_ends_its_spans() -> None:
    recorded = Recorded()
    one, span = asked(recorded, attempt())
    async with pair(tracer=recorded.tracer) as world, router(world) as end:
        world.prefill.runner.hold()
        handover_id = new_id()
        await end.start(one, handover_id)
        running = asyncio.ensure_future(world.run(one, handover_id))
        await until(lambda: bool(world.prefilling.num_attempts and world.decoding.num_attempts))
        await end.cancel(one)
        await world.cancel_prefill(one)
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        world.prefill.runner.open()
    span.end()
    names = ("prefill.run", "handover.give", "decode.run", "handover.collect")
    assert {outcome(recorded.one(name)) for name in names} == {"cancelled"}
    assert not recorded.open


async def test_a_router_that_is_gone_ends_its_spans() -> None:
    recorded = Recorded()
    one, span = asked(recorded, attempt(max_tokens=10_000))
    async with pair(tracer=recorded.tracer, resume_window_s=0.0) as world:
        world.decode.runner.hold()
        async with router(world) as end:
            await end.start(one)
            await until(lambda: bool(world.decoding.num_attempts))
        await until(lambda: not world.decoding.num_attempts)
        assert outcome(recorded.one("decode.run")) == "cancelled"
    span.end()
    assert not recorded.open


async def test_what_is_not_traced_has_no_spans() -> None:
    recorded = Recorded()
    one = attempt()
    async with pair(tracer=recorded.tracer) as world, router(world) as end:
        handover_id = new_id()
        await end.start(one, handover_id)
        await world.run(one, handover_id)
        await end.ended(one)
    assert not recorded.spans and not recorded.open
