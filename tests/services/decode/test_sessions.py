"""One stream per router: broken and resumed anywhere, replaced, abandoned."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest

from batonlm.core.errors import Cancelled, Internal
from batonlm.core.request.attempt import AttemptKey, ChoiceTokens, SequenceKey
from batonlm.core.request.request import FinishReason
from batonlm.core.scheduler.events import AttemptFailed
from batonlm.decode import service as service_module
from batonlm.decode import servicer as servicer_module
from batonlm.decode.sessions import RouterSession
from batonlm.rpc.convert import choice_tokens_from_proto
from batonlm.v1.types_pb2 import FINISH_REASON_LENGTH
from batonlm.worker import service as worker_service
from tests.services.worker.pair import (
    PATIENCE_S,
    attempt,
    keys_of,
    new_id,
    pair,
    reference,
    until,
)
from tests.services.worker.router_end import RouterEnd, router


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("have", [0, 1, 5, 12])
async def test_a_broken_stream_goes_on_from_any_position(have: int, handed_over: bool) -> None:
    """Whatever the router had got of it, it gets the rest: no gap, and nothing it has."""
    one = attempt(n=2)
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        handover_id = new_id() if handed_over else b""
        await end.start(one, handover_id)
        run = world.run(one, handover_id) if handed_over else None
        world.decode.runner.allow(7)
        await until(lambda: all(len(end.tokens[key]) >= 2 for key in keys_of(one)))
        await end.break_off()
        world.decode.runner.open()
        await until(lambda: world.decoding.num_attempts == 0 or have > 5)
        for key in keys_of(one):
            end.tokens[key] = reference(one)[key.choice][:have]
            end.ends.pop(key, None)
        await end.connect(end.next_positions())
        assert end.lost == []
        if have < 12:
            assert await end.ended(one) == reference(one)
            assert all(end.firsts[key] >= have for key in keys_of(one))
        if run is not None:
            await run


async def test_it_breaks_at_every_frame_and_nothing_is_lost_or_repeated() -> None:
    one = attempt(n=3, max_tokens=15)
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        await end.start(one)
        world.decode.runner.allow(5)
        async with asyncio.timeout(PATIENCE_S):
            while set(keys_of(one)) - set(end.ends):
                await end.break_off()
                world.decode.runner.allow(1)
                await end.connect(end.next_positions())
                assert end.lost == []
                before = sum(map(len, end.tokens.values()))
                await until(
                    lambda before=before: (
                        sum(map(len, end.tokens.values())) > before  # type: ignore[misc]
                        or not set(keys_of(one)) - set(end.ends)
                        or world.decode.runner.num_done == world.decode.runner.num_begun - 1
                    )
                )
        assert await end.ended(one) == reference(one)


async def test_a_newer_stream_of_the_same_router_wins() -> None:
    one = attempt(max_tokens=40)
    async with pair() as world, router(world) as old:
        world.decode.runner.hold()
        await old.start(one)
        world.decode.runner.allow(8)
        await until(lambda: len(old.tokens[keys_of(one)[0]]) >= 3)
        new = RouterEnd.of(world, old.identity.instance_id)
        new.tokens, new.positions = {k: list(v) for k, v in old.tokens.items()}, old.positions
        await new.connect(new.next_positions())
        world.decode.runner.open()
        assert await new.ended(one) == reference(one)
        assert old.reading is not None
        async with asyncio.timeout(PATIENCE_S):
            await old.reading
        assert len(old.tokens[keys_of(one)[0]]) < 40
        await old.break_off()
        # The old stream's end is not taken for the router's.
        assert len(world.decoding.sessions) == 1
        await new.break_off()


async def test_what_a_replaced_stream_waited_for_goes_to_the_newer_one() -> None:
    one = attempt()
    (key,) = one.keys()
    session = RouterSession("router")
    old = session.attach()
    session.open(one)
    waiting = asyncio.create_task(session.next_frame(old, PATIENCE_S))
    await asyncio.sleep(0)
    session.resume({key: 0})
    new = session.attach()
    session.tokens(ChoiceTokens(key, 0, (5,)))
    assert await waiting is None
    frame = await session.next_frame(new, PATIENCE_S)
    assert frame is not None
    assert [choice_tokens_from_proto(tokens).token_ids for tokens in frame.tokens] == [(5,)]


async def test_messages_of_a_replaced_stream_are_not_obeyed() -> None:
    one = attempt(max_tokens=40)
    async with pair() as world, router(world) as old:
        world.decode.runner.hold()
        await old.start(one)
        await until(lambda: world.decode.runner.num_begun == 1)
        new = RouterEnd.of(world, old.identity.instance_id)
        new.tokens, new.positions = {keys_of(one)[0]: []}, {keys_of(one)[0]: 0}
        await new.connect(new.next_positions())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await old.cancel(one)
        world.decode.runner.open()
        assert await new.ended(one) == reference(one)
        await new.break_off()


async def test_a_router_that_does_not_come_back_holds_nothing() -> None:
    mine, others = attempt("mine", max_tokens=300), attempt("others", seed=2, max_tokens=60)
    async with pair(resume_window_s=0.3) as world, router(world) as end, router(world) as other:
        world.decode.runner.hold()
        await end.start(mine)
        await other.start(others)
        await until(lambda: world.decode.runner.num_begun == 1)
        await end.break_off()
        await until(lambda: len(world.decoding.sessions) == 1)
        assert mine.key not in world.decoding.attempts
        world.decode.runner.open()
        assert await other.ended(others) == reference(others)
        await end.connect({keys_of(mine)[0]: 1})
        assert end.lost == [keys_of(mine)[0]]


async def test_what_a_resumed_router_does_not_name_is_freed() -> None:
    kept, left = attempt("kept", max_tokens=30), attempt("left", seed=2, max_tokens=300)
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        for one in (kept, left):
            await end.start(one)
        await until(lambda: world.decoding.num_attempts == 2)
        await end.break_off()
        unknown = SequenceKey("never heard of", 0, 0)
        await end.connect({keys_of(kept)[0]: 0, unknown: 3})
        assert end.lost == [unknown]
        assert world.decoding.num_attempts == 1
        world.decode.runner.open()
        assert await end.ended(kept) == reference(kept)


async def test_ended_sequences_are_forgotten_after_the_window() -> None:
    one = attempt(n=3)
    async with pair(resume_window_s=0.1) as world, router(world) as end:
        await end.start(one)
        assert await end.ended(one) == reference(one)
        session = world.decoding.sessions[end.identity.instance_id]
        await until(lambda: not session.keys)


async def test_nothing_is_forgotten_while_the_stream_is_broken() -> None:
    one, session = attempt(), RouterSession("router")
    (key,) = one.keys()
    session.open(one)
    stream = session.attach()
    session.tokens(ChoiceTokens(key, 0, (5,), finish_reason=FinishReason.LENGTH))
    assert await session.next_frame(stream, PATIENCE_S) is not None
    session.detach(stream)
    session.forget_ended(float("inf"))
    assert session.resume({key: 0}) == ([], [])
    frame = await session.next_frame(session.attach(), PATIENCE_S)
    assert frame is not None and frame.tokens[0].finish_reason == FINISH_REASON_LENGTH
    session.forget_ended(float("inf"))
    assert not session.keys


async def test_a_router_that_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STUCK_S", 0.3)
    one = attempt(max_tokens=300)
    async with pair() as world:
        session = world.decoding.session("deaf")
        stream = session.attach()
        world.decoding.start(session, one, None, 0)
        assert await session.next_frame(stream, PATIENCE_S) is not None
        # It writes this frame, for ever.
        await until(lambda: len(world.decoding.sessions) == 0)
        assert session.stream is None and world.decoding.num_attempts == 0


async def test_the_number_of_routers_and_attempts_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "MAX_SESSIONS", 1)
    monkeypatch.setattr(worker_service, "MAX_ATTEMPTS", 1)
    first, second = attempt("first", max_tokens=30), attempt("second")
    async with pair() as world, router(world) as end:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RouterEnd.of(world).connect()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        world.decode.runner.hold()
        await end.start(first)
        await end.start(second)
        assert (await end.failed(second)).retryable
        end.failures.clear()
        world.decode.runner.open()
        assert await end.ended(first) == reference(first)


async def test_silence_is_filled_with_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "HEARTBEAT_S", 0.05)
    async with pair() as world, router(world) as end:
        await until(lambda: end.num_heartbeats >= 2)


async def test_a_server_that_stops_does_not_wait_for_open_streams() -> None:
    one = attempt(max_tokens=1000)
    async with pair() as world, router(world) as end:
        await end.start(one)
        await until(lambda: bool(end.tokens[keys_of(one)[0]]))
        async with asyncio.timeout(PATIENCE_S):
            await world.decode.server.stop(0.2)
        assert end.reading is not None
        async with asyncio.timeout(PATIENCE_S):
            await end.reading
        await world.decoding.close()
        assert len(world.decoding.sessions) == 0


async def test_a_failure_of_a_choice_that_is_gone_does_not_fail_the_others() -> None:
    one = attempt(n=2, max_tokens=40)
    async with pair() as world, router(world) as end:
        world.decode.runner.hold()
        await end.start(one)
        await until(lambda: world.decode.runner.num_begun == 1)
        await end.cancel(one, 1)
        await until(lambda: world.decoding.attempts[one.key].choices == {0})
        world.decoding.deliver([AttemptFailed(one.key, (1,), Internal("too late"))])
        world.decoding.deliver(
            [AttemptFailed(AttemptKey("unknown", 0), (0,), Internal("too late"))]
        )
        world.decode.runner.open()
        await until(lambda: SequenceKey("r", 0, 0) in end.ends)
        assert not end.failures
        assert end.tokens[SequenceKey("r", 0, 0)] == reference(one)[0]


async def test_failures_that_no_stream_took_are_kept_for_the_next_one() -> None:
    session = RouterSession("router")
    session.failed(AttemptKey("r", 0), (0,), Cancelled("for a reason"))
    frame = await session.next_frame(session.attach(), PATIENCE_S)
    assert frame is not None and frame.failures[0].choices == [0]
