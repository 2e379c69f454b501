"""Sequences that follow a grammar: every row waits for the tokens before it, however it is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.request import FinishReason, SamplingParams
from batonlm.core.scheduler.events import AttemptFailed, Event, FirstTokens, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import PENDING
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from tests.core.attempts import (
    BLOCK_SIZE,
    EOS,
    attempt,
    decode_loop,
    prefill_loop,
    run_out,
    runner,
)
from tests.core.grammars import ANY, HashGrammar, follows

GREEDY = SamplingParams(temperature=0.0)


def bound(name: str, seed: int = 0, *, size: int = 10, max_tokens: int = 20, n: int = 1) -> Attempt:
    asked = attempt(name, seed=seed, size=size, max_tokens=max_tokens, n=n)
    return replace(asked, grammar=ANY)


def outputs(events: list[Event]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for event in events:
        for made in event.tokens if isinstance(event, NewTokens) else ():
            found.setdefault((made.key.request_id, made.key.choice), []).extend(made.token_ids)
    return found


def ends(events: list[Event]) -> list[FinishReason]:
    told = [made for event in events if isinstance(event, NewTokens) for made in event.tokens]
    return [made.finish_reason for made in told if made.finish_reason is not None]


def alone(one: Attempt) -> dict[tuple[str, int], list[int]]:
    loop = decode_loop()
    loop.scheduler.add(one, 0.0, grammar=HashGrammar())
    return outputs(run_out(loop))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("swap", [0, 40])
def test_tight_rooms_and_steps_ahead_change_nothing(depth: int, swap: int) -> None:
    asked = [bound(f"r{i}", i, n=1 + i % 2, max_tokens=30) for i in range(6)]
    expected = {key: tokens for one in asked for key, tokens in alone(one).items()}
    loop = decode_loop(28, SchedulerPolicy(headroom=1), depth=depth, num_swap_blocks=(swap, 0))
    for one in asked:
        loop.scheduler.add(one, 0.0, grammar=HashGrammar())
    assert outputs(run_out(loop)) == expected
    assert sum(loop.scheduler.preemptions.values()) > 0
    assert all(len(tokens) == 30 and follows(tokens) for tokens in expected.values())


def test_steps_ahead_are_for_those_who_follow_no_grammar() -> None:
    loop = decode_loop(depth=2)
    loop.scheduler.add(bound("grammar"), 0.0, grammar=HashGrammar())
    loop.scheduler.add(attempt("none", seed=1, max_tokens=20), 0.0)
    pending = []
    for number in range(200):
        while loop.has_room and (plan := loop.plan(number)) is not None:
            pending += [c.samples[0] for c in plan.chunks if tuple(c.token_ids) == (PENDING,)]
            loop.submit(plan)
        if not loop.in_flight:
            break
        loop.apply(loop.collect()[1], number)
    assert pending
    assert not any(row.allowed for row in pending)


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
def test_it_goes_on_behind_what_another_worker_made(cut: int) -> None:
    one = bound("r")
    whole = alone(one)["r", 0]
    loop = decode_loop()
    rest = replace(one, attempt=1, token_ids=(*one.token_ids, *whole[:cut]))
    loop.scheduler.add(rest, 0.0, grammar=HashGrammar())
    assert outputs(run_out(loop))["r", 0] == whole[cut:]


def test_prefill_draws_token_0_of_every_choice_under_it() -> None:
    one = bound("r", size=40, n=3)
    expected = alone(one)
    loop = prefill_loop()
    loop.scheduler.add(one, 0.0, keep=False, grammar=HashGrammar())
    (first,) = [event for event in run_out(loop) if isinstance(event, FirstTokens)]
    made = {(t.key.request_id, t.key.choice): list(t.token_ids) for t in first.tokens}
    assert made == {key: tokens[:1] for key, tokens in expected.items()}


def test_the_end_is_forced_when_nothing_else_can_follow() -> None:
    for stop in ({}, {"min_tokens": 15}, {"ignore_eos": True}):
        one = bound("r")
        one = replace(one, stop=replace(one.stop, **stop))
        loop = decode_loop()
        loop.scheduler.add(one, 0.0, grammar=HashGrammar(ends_at=5))
        events = run_out(loop)
        assert outputs(events)["r", 0][5:] == [EOS]
        assert ends(events) == [FinishReason.STOP]


@pytest.mark.parametrize(("stop", "least"), [({"min_tokens": 12}, 13), ({"ignore_eos": True}, 20)])
def test_an_end_that_must_not_come_gives_way_to_anything_else(
    stop: dict[str, Any], least: int
) -> None:
    for seed in range(5):
        one = bound("r", seed)
        one = replace(one, stop=replace(one.stop, **stop))
        pool = BlockPool(64, BLOCK_SIZE)
        engine = runner(64, eos_every=1)
        loop = EngineLoop(engine, Scheduler(pool, SchedulerPolicy(), engine.model))
        loop.scheduler.add(one, 0.0, grammar=HashGrammar(may_end=True))
        assert len(outputs(run_out(loop))["r", 0]) == least


def test_who_is_stuck_fails_alone_and_is_told_why() -> None:
    loop = decode_loop()
    loop.scheduler.add(bound("stuck"), 0.0, grammar=HashGrammar(stuck_at=4))
    loop.scheduler.add(bound("fine", 1), 0.0, grammar=HashGrammar())
    events = run_out(loop)
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert failed.key.request_id == "stuck"
    assert isinstance(failed.error, InvalidArgument)
    assert (failed.error.field, failed.error.message) == ("grammar", "cannot be followed further")
    assert len(outputs(events)["stuck", 0]) == 4
    assert len(outputs(events)["fine", 0]) == 20
    first = prefill_loop()
    first.scheduler.add(bound("stuck"), 0.0, keep=False, grammar=HashGrammar(stuck_at=0))
    (failed,) = [event for event in run_out(first) if isinstance(event, AttemptFailed)]
    assert failed.error.field == "grammar"


def test_a_grammar_that_was_not_compiled_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        decode_loop().scheduler.add(bound("r"), 0.0)
