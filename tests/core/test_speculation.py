"""Sequences with drafts: the same tokens in fewer steps, and only where that pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.request import FinishReason, SamplingParams
from batonlm.core.scheduler.events import AttemptFailed, Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan, StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.core.scheduler.speculation import Speculation
from tests.core.attempts import (
    BLOCK_SIZE,
    EOS,
    Outputs,
    attempt,
    expected,
    run_out,
    runner,
)
from tests.core.drafting import Foretold
from tests.core.grammars import ANY, HashGrammar, follows

GREEDY = SamplingParams(temperature=0.0)


def foretold(*attempts: Attempt, wrong_every: int = 0, eos_every: int = 0) -> Foretold:
    drafter = Foretold(wrong_every)
    for one in attempts:
        for tokens in expected(one, eos_every).values():
            drafter.foretell(one.token_ids, tokens)
    return drafter


def loop_with(
    drafter: Foretold,
    policy: SchedulerPolicy | None = None,
    *,
    num_blocks: int = 64,
    **of_runner: Any,
) -> EngineLoop:
    depth = of_runner.get("depth", 1)
    engine = runner(num_blocks, delay_steps=depth - 1, **of_runner)
    pool = BlockPool(num_blocks, BLOCK_SIZE, state_positions=of_runner.get("state_positions", 0))
    policy = policy or SchedulerPolicy(headroom=8)
    return EngineLoop(engine, Scheduler(pool, policy, engine.model, drafter=drafter))


def counted(loop: EngineLoop) -> Speculation:
    assert loop.scheduler.speculation is not None
    return loop.scheduler.speculation


def steps(loop: EngineLoop, most: int = 500) -> Iterable[tuple[StepPlan, list[Event]]]:
    """One by one until nothing is left."""
    for number in range(most):
        plan = loop.plan(float(number))
        if plan is None:
            break
        loop.submit(plan)
        events = loop.apply(loop.collect()[1], float(number))
        loop.idle_check()
        yield plan, events
    assert not loop.scheduler.has_work


def test_right_drafts_save_steps() -> None:
    one = attempt(max_tokens=33)
    loop = loop_with(foretold(one))
    loop.scheduler.add(one, 0.0)
    plans = []
    heard = Outputs()
    for plan, events in steps(loop):
        plans.append(plan)
        heard.take(events)
        (made,) = [e for e in events if isinstance(e, NewTokens)]
        assert len(made.tokens) == 1, "all of a step is one entry"
    assert heard.of(one) == expected(one)
    # Token 0 with the prompt, some without drafts, and then as many as are tried until it is known
    # what they take.
    assert [plan.num_tokens for plan in plans] == [10, 1, 1, 1, 9, 9, 9, 2]
    assert [plan.work for plan in plans][3:5] == [StepWork(1, 12), StepWork(1, 13, 0, 8)]
    speculation = counted(loop)
    assert (speculation.drafted, speculation.accepted, speculation.saved_steps) == (25, 25, 25)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wrong_every", [1, 2, 5])
def test_wrong_drafts_change_nothing(depth: int, wrong_every: int) -> None:
    asked = [attempt(f"r{i}", seed=i, n=1 + i % 2, max_tokens=30) for i in range(5)]
    loop = loop_with(foretold(*asked, wrong_every=wrong_every), depth=depth)
    for one in asked:
        loop.scheduler.add(one, 0.0)
    heard = Outputs().take(run_out(loop))
    assert all(heard.of(one) == expected(one) for one in asked)
    speculation = counted(loop)
    assert speculation.saved_steps <= speculation.accepted < speculation.drafted
    assert (speculation.accepted > 0) == (wrong_every > 1)


def test_an_end_within_the_drafts_is_the_end() -> None:
    one = attempt(max_tokens=60)
    whole = expected(one, eos_every=12)[0]
    assert whole[-1] == EOS
    drafter = Foretold(0)
    # It goes on, if one does not look.
    drafter.foretell(one.token_ids, [*whole, *range(100, 140)])
    loop = loop_with(drafter, eos_every=12)
    loop.scheduler.add(one, 0.0)
    events = run_out(loop)
    assert Outputs().take(events).of(one)[0] == whole
    (end,) = [
        made.finish_reason
        for event in events
        for made in (event.tokens if isinstance(event, NewTokens) else ())
        if made.finish_reason is not None
    ]
    assert end is FinishReason.STOP


@pytest.mark.parametrize(("least", "most"), [(0, 2), (0, 7), (25, 40)])
def test_stops_are_where_they_are_without_drafts(least: int, most: int) -> None:
    one = attempt(min_tokens=least, max_tokens=most)
    loop = loop_with(foretold(one, eos_every=6), eos_every=6)
    loop.scheduler.add(one, 0.0)
    assert Outputs().take(run_out(loop)).of(one) == expected(one, 6)


@pytest.mark.parametrize("limit", [1, 2, 6])
def test_drafts_stay_within_what_is_confirmed(limit: int) -> None:
    one = attempt(max_tokens=30)
    loop = loop_with(foretold(one))
    loop.scheduler.add(one, 0.0, max_unconfirmed=limit)
    heard, most = Outputs(), 0
    (key,) = one.keys()
    for turn in range(60):
        events = loop.step(float(turn))
        before = len(heard.tokens.get(key, ()))
        heard.take(events)
        most = max(most, len(heard.tokens.get(key, ())) - before)
        if not events:
            loop.scheduler.confirm(key, len(heard.tokens[key]))
    assert heard.of(one) == expected(one)
    assert most == limit


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_that_a_grammar_forbids_are_not_computed(depth: int) -> None:
    asked = [replace(attempt(f"r{i}", seed=i, max_tokens=30), grammar=ANY) for i in range(3)]
    alone = loop_with(Foretold(0))
    for one in asked:
        alone.scheduler.add(one, 0.0, grammar=HashGrammar(ends_at=25))
    wanted = Outputs().take(run_out(alone))
    drafter = Foretold(4)
    for one in asked:
        drafter.foretell(one.token_ids, wanted.of(one)[0])
    loop = loop_with(drafter, depth=depth)
    for one in asked:
        loop.scheduler.add(one, 0.0, grammar=HashGrammar(ends_at=25))
    heard = Outputs().take(run_out(loop))
    assert heard.tokens == wanted.tokens
    assert all(follows(tokens) for tokens in heard.tokens.values())
    speculation = counted(loop)
    # What is wrong is forbidden here but once in sixty times.
    assert 0 < 0.9 * speculation.drafted <= speculation.accepted


def test_a_grammar_that_gets_stuck_behind_drafts_ends_the_sequence_there() -> None:
    one = replace(attempt(max_tokens=30), grammar=ANY)
    alone = loop_with(Foretold(0))
    alone.scheduler.add(one, 0.0, grammar=HashGrammar())
    drafter = Foretold(0)
    drafter.foretell(one.token_ids, Outputs().take(run_out(alone)).of(one)[0])
    loop = loop_with(drafter)
    loop.scheduler.add(one, 0.0, grammar=HashGrammar(stuck_at=9))
    events = run_out(loop)
    assert len(Outputs().take(events).of(one)[0]) == 9
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert "followed" in failed.error.message


def test_who_wants_none_gets_none() -> None:
    one, other = attempt("a", max_tokens=20), attempt("b", seed=1, max_tokens=20)
    loop = loop_with(foretold(one, other))
    loop.scheduler.add(replace(one, no_speculation=True), 0.0)
    loop.scheduler.add(other, 0.0)
    drafted = {c.sequence_id for plan, _ in steps(loop) for c in plan.chunks if c.num_drafts}
    assert drafted == {1}


def test_a_model_with_a_state_gets_none() -> None:
    loop = loop_with(foretold(attempt()), state_positions=4)
    assert loop.scheduler.speculation is None


def test_drafts_take_the_room_that_rows_leave() -> None:
    policy = SchedulerPolicy(max_sequences=6, token_budget=24, prefill_budget=16, headroom=8)
    asked = [attempt(f"r{i}", seed=i, max_tokens=25) for i in range(4)]
    loop = loop_with(foretold(*asked), policy)
    for one in asked:
        loop.scheduler.add(one, 0.0)
    heard, most = Outputs(), 0
    for plan, events in steps(loop):
        heard.take(events)
        most = max(most, plan.work.drafts)
        assert plan.num_tokens <= 24
        assert sum(len(chunk.samples) for chunk in plan.chunks) <= 6
    assert 0 < most < 6
    assert all(heard.of(one) == expected(one) for one in asked)


def test_nobody_loses_blocks_to_drafts() -> None:
    one, other = attempt("a", size=21, max_tokens=40), attempt("b", seed=1, size=21, max_tokens=40)
    loop = loop_with(foretold(one, other), SchedulerPolicy(headroom=1), num_blocks=17)
    for each in (one, other):
        loop.scheduler.add(each, 0.0)
    drafts = 0
    for plan, _ in steps(loop):
        if len(loop.scheduler.sequences.running) == 2:
            drafts += plan.work.drafts
    assert drafts > 0
    # As many as without: both cannot end side by side.
    assert loop.scheduler.preemptions == {"recompute": 1}
