"""Scheduler, sequences that stop to be handed over: what is told, kept and given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import HandoverFailed, InvalidArgument, NotFound
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.events import AttemptFailed, Event, Held, KvComplete, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from tests.core.attempts import Outputs, attempt, decode_loop, expected, run_out

KEY = SequenceKey("r", 0, 0)


def running(loop: EngineLoop, one: Attempt, steps: int) -> Outputs:
    loop.scheduler.add(one, 0.0)
    outputs = Outputs()
    for _ in range(steps):
        outputs.take(loop.step(0.0))
    return outputs


def held(events: list[Event]) -> list[Held]:
    return [event for event in events if isinstance(event, Held)]


@pytest.mark.parametrize("depth", [1, 2])
def test_it_stops_when_what_was_launched_is_told(depth: int) -> None:
    loop = decode_loop(depth=depth)
    one = attempt(size=10, max_tokens=30, sampling=SamplingParams(seed=3, top_logprobs=1))
    outputs = running(loop, one, 6)
    assert loop.scheduler.hold(KEY)
    events: list[Event] = loop.scheduler.take_events()
    while loop.in_flight:
        events += loop.step(0.0)
    outputs.take(events)
    (stopped,) = held(events)
    assert events.index(stopped) == len(events) - 1, "behind all tokens"
    output = outputs.tokens[KEY]
    assert stopped.newest.position == len(output) - 1
    assert tuple(stopped.newest.token_ids) == (output[-1],)
    assert len(stopped.newest.logprobs) == 1
    assert stopped.num_positions == 10 + len(output) - 1
    assert loop.step(0.0) == [], "nothing more of it is computed"
    payload = bytearray(stopped.num_positions * loop.runner.layout.bytes_per_position)
    loop.runner.pack(stopped.extents, 0, stopped.num_positions, memoryview(payload))
    loop.scheduler.cancel(one.key)
    loop.idle_check()
    assert not loop.scheduler.has_work
    assert loop.scheduler.load.free_blocks == 64
    # Elsewhere it goes on as if nothing had been.
    other = decode_loop()
    rest = replace(one, attempt=1, token_ids=(*one.token_ids, *output[:-1]))
    assert other.scheduler.reserve(rest, 0.0) == 0
    extents = other.scheduler.extents(rest.key)
    other.runner.unpack(extents, 0, stopped.num_positions, memoryview(payload))
    other.scheduler.admit(rest.key, (stopped.newest,), 0.0)
    made = [t for e in run_out(other) if isinstance(e, NewTokens) for t in e.tokens]
    assert [t.position for t in made] == list(range(len(output) - 1, 30))
    whole = output[:-1] + [token for t in made for token in t.token_ids]
    assert whole == expected(one)[0]


def test_an_awaited_token_may_end_it_instead() -> None:
    loop = decode_loop(depth=2)
    one = attempt(max_tokens=6)
    outputs = running(loop, one, 5)
    assert loop.in_flight
    assert loop.scheduler.hold(KEY)
    events = run_out(loop)
    assert not held(events)
    assert outputs.take(events).of(one) == expected(one)


def test_only_what_runs_can_stop_and_once() -> None:
    loop = decode_loop(depth=2)
    one = attempt(max_tokens=30)
    assert not loop.scheduler.hold(KEY)
    loop.scheduler.add(one, 0.0)
    assert not loop.scheduler.hold(KEY), "it waits"
    for _ in range(4):
        loop.step(0.0)
    assert loop.scheduler.hold(KEY)
    assert not loop.scheduler.hold(KEY)
    loop.scheduler.cancel(one.key)
    run_out(loop)
    assert loop.scheduler.load.free_blocks == 64


def test_a_fork_stops_only_when_its_own_block_is_copied() -> None:
    loop = decode_loop()
    one = attempt(size=10, n=2, max_tokens=12)
    loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(loop.step(0.0))
    fork = SequenceKey("r", 1, 0)
    stopped = {key: loop.scheduler.hold(key) for key in (KEY, fork)}
    assert sorted(stopped.values()) == [False, True], "one of them took the table over"
    outputs.take(loop.step(0.0))
    other = KEY if stopped[fork] else fork
    assert loop.scheduler.hold(other)
    assert len(held(loop.scheduler.take_events())) == 1
    assert len(outputs.tokens[other]) == 2
    loop.scheduler.cancel(one.key)
    loop.idle_check()
    assert loop.scheduler.load.free_blocks == 64


def test_kv_that_swap_memory_lost_fails_the_one_that_stops() -> None:
    """Its KV was to come back with a step that was in flight when it was told to stop."""
    policy = SchedulerPolicy(headroom=1)
    loop = decode_loop(20, policy, num_swap_blocks=(40, 0), lost_swap_blocks=range(40), depth=2)
    many = [attempt(f"r{i}", size=22, seed=i, max_tokens=30) for i in range(3)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    stopped, events, now = None, list[Event](), 0.0
    while loop.scheduler.has_work:
        now += 0.1
        swapped = {g.id for g in loop.scheduler.sequences.waiting if g.stored is not None}
        plan = loop.plan(now)
        events += loop.scheduler.take_events()
        if plan is not None:
            loop.submit(plan)
            if stopped is None and plan.swap_in:
                (restored,) = swapped & loop.scheduler.sequences.running.keys()
                stopped = loop.scheduler.sequences.running[restored].key
                assert loop.scheduler.hold(stopped)
        if loop.in_flight and (plan is None or not loop.has_room):
            events += loop.apply(loop.collect()[1], now)
    assert stopped is not None
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert isinstance(failed.error, HandoverFailed)
    assert (failed.key.request_id, failed.choices) == (stopped.request_id, (0,))
    assert not held(events)
    outputs = Outputs().take(events)
    for one in many:
        if one.request_id != stopped.request_id:
            assert outputs.of(one) == expected(one)
    loop.idle_check()
    assert loop.scheduler.load.free_blocks == 20


@pytest.mark.parametrize("depth", [1, 2])
def test_what_nobody_collected_runs_on_as_another_attempt(depth: int) -> None:
    loop = decode_loop(depth=depth)
    one = attempt(size=10, max_tokens=30, sampling=SamplingParams(seed=3, top_logprobs=1))
    outputs = running(loop, one, 6)
    assert loop.scheduler.hold(KEY)
    outputs.take(loop.scheduler.take_events())
    while loop.in_flight:
        outputs.take(loop.step(0.0))
    output = outputs.tokens[KEY]
    again = replace(one, attempt=1, token_ids=(*one.token_ids, *output[:-1]))
    for other in (replace(again, choices=(1,)), replace(again, token_ids=again.token_ids[1:])):
        with pytest.raises(InvalidArgument):
            loop.scheduler.resume(KEY, other)
    loop.scheduler.resume(KEY, again)
    with pytest.raises(NotFound):
        loop.scheduler.resume(KEY, again)
    complete, *rest = run_out(loop)
    assert complete == KvComplete(again.key, len(again.token_ids), 0.0)
    made = [t for e in rest if isinstance(e, NewTokens) for t in e.tokens]
    assert {t.key for t in made} == {SequenceKey("r", 0, 1)}
    assert [t.position for t in made] == list(range(len(output) - 1, 30))
    assert all(len(t.logprobs) == 1 for t in made)
    whole = output[:-1] + [token for t in made for token in t.token_ids]
    assert whole == expected(one)[0]
    loop.idle_check()
    assert not loop.scheduler.has_work
    assert loop.scheduler.load.free_blocks == 64


def test_what_was_not_offered_runs_on_as_it_was() -> None:
    loop = decode_loop(depth=2)
    one = attempt(max_tokens=30)
    outputs = running(loop, one, 5)
    assert loop.scheduler.hold(KEY)
    loop.scheduler.resume(KEY)
    assert outputs.take(run_out(loop)).of(one) == expected(one)
    loop.idle_check()
