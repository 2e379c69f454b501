"""Scheduler with KV from elsewhere: reserve, admit, and who is let in."""

from __future__ import annotations

import pytest

from batonlm.core.errors import (
    InvalidArgument,
    NotFound,
)
from batonlm.core.request.attempt import Attempt, AttemptKey
from batonlm.core.scheduler.events import NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from tests.core.attempts import (
    VOCAB_SIZE,
    Outputs,
    attempt,
    decode_loop,
    expected,
    fill_in,
    handed_over,
    run_out,
    started,
)


def hand_over(
    loop: EngineLoop, one: Attempt, *, max_unconfirmed: int = 0, eos_every: int = 0
) -> int:
    """Reserves, fills in and admits; returns the first position that was needed."""
    first, kv = handed_over(one, eos_every)
    position = loop.scheduler.reserve(one, 0.0, max_unconfirmed=max_unconfirmed)
    assert position is not None
    fill_in(loop, one, position, kv)
    loop.scheduler.admit(one.key, first.tokens, 0.0)
    return position


def test_kv_from_elsewhere_gives_the_same_tokens_as_computed_here() -> None:
    loop = decode_loop()
    one = attempt(size=14, n=3, max_tokens=12)
    assert hand_over(loop, one) == 0
    outputs = Outputs().take(run_out(loop))
    assert outputs.of(one) == expected(one)
    assert outputs.ended == set(one.keys())


def test_token_0_is_told_again_and_started_before_it() -> None:
    loop = decode_loop()
    one = attempt(size=14, n=2)
    first, _ = handed_over(one)
    hand_over(loop, one)
    events = loop.step(0.0)
    (began,) = started(events[:1])
    assert (began.key, began.cached_tokens) == (one.key, 0)
    again = events[1]
    assert isinstance(again, NewTokens) and again.tokens == first.tokens


def test_only_positions_that_are_not_here_are_needed() -> None:
    loop = decode_loop()
    one = attempt("a", size=16, max_tokens=8)
    hand_over(loop, one)
    run_out(loop)
    longer, aligned = attempt("b", size=18, max_tokens=8), attempt("c", size=16, max_tokens=8)
    foreign = attempt("d", size=16, max_tokens=8, salt=b"other")
    assert hand_over(loop, longer) == 16
    assert hand_over(loop, aligned) == 16, "nothing at all is needed"
    assert hand_over(loop, foreign) == 0
    outputs = Outputs().take(run_out(loop))
    for one in (longer, aligned, foreign):
        assert outputs.of(one) == expected(one)


def test_choices_that_token_0_ends_do_not_run() -> None:
    loop = decode_loop(eos_every=2)
    one = next(
        one
        for one in (attempt(size=9, seed=seed, n=4) for seed in range(20))
        if len({t.finish_reason for t in handed_over(one, 2)[0].tokens}) == 2
    )
    hand_over(loop, one, eos_every=2)
    running = loop.scheduler.load.running_sequences
    assert 0 < running < 4
    outputs = Outputs().take(run_out(loop))
    assert outputs.of(one) == expected(one, 2)


def test_max_tokens_of_1_ends_at_token_0() -> None:
    loop = decode_loop()
    one = attempt(max_tokens=1)
    hand_over(loop, one)
    assert not loop.scheduler.has_work
    loop.idle_check()
    assert Outputs().take(loop.step(0.0)).ended == set(one.keys())


def test_tokens_that_do_not_fit_a_reservation_are_refused_and_it_stays() -> None:
    loop = decode_loop()
    one = attempt(n=2)
    first, kv = handed_over(one)
    loop.scheduler.reserve(one, 0.0)
    for tokens in (
        first.tokens[:1],
        [t._replace(position=1) for t in first.tokens],
        [t._replace(token_ids=(5, 6)) for t in first.tokens],
        [t._replace(token_ids=(VOCAB_SIZE,)) for t in first.tokens],
    ):
        with pytest.raises(InvalidArgument):
            loop.scheduler.admit(one.key, tokens, 0.0)
    fill_in(loop, one, 0, kv)
    loop.scheduler.admit(one.key, first.tokens, 0.0)
    with pytest.raises(NotFound):
        loop.scheduler.admit(one.key, first.tokens, 0.0)
    with pytest.raises(NotFound):
        loop.scheduler.extents(one.key)
    assert Outputs().take(run_out(loop)).of(one) == expected(one)


def test_a_choice_cancelled_while_kv_arrives_does_not_run() -> None:
    for choice in range(3):
        loop = decode_loop()
        one = attempt(size=13, n=3)
        first, kv = handed_over(one)
        assert loop.scheduler.reserve(one, 0.0) == 0
        loop.scheduler.cancel(one.key, (choice,))
        fill_in(loop, one, 0, kv)
        loop.scheduler.admit(one.key, first.tokens, 0.0)
        rest = {c: tokens for c, tokens in expected(one).items() if c != choice}
        assert Outputs().take(run_out(loop)).of(one) == rest


def test_everything_let_in_can_grow_by_the_headroom() -> None:
    loop = decode_loop(20, SchedulerPolicy(headroom=16))
    let_in = []
    for index in range(10):
        one = attempt(f"r{index}", size=8, seed=index, max_tokens=17)
        if loop.scheduler.reserve(one, 0.0) is not None:
            let_in.append(one)
    assert len(let_in) == 3, "6 blocks each: 8 positions and 16 more"
    for one in let_in:
        first, kv = handed_over(one)
        fill_in(loop, one, 0, kv)
        loop.scheduler.admit(one.key, first.tokens, 0.0)
    while loop.scheduler.has_work:
        assert loop.scheduler.load.waiting_sequences == 0, "nobody was pushed out"
        loop.step(0.0)


def test_nobody_is_let_in_who_would_soon_push_somebody_out() -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=12))
    runs = attempt("runs", size=8, max_tokens=50)
    loop.scheduler.add(runs, 0.0)
    for _ in range(12):
        loop.step(0.0)
    next_one = attempt("next", size=24, seed=1, max_tokens=20)
    assert loop.scheduler.load.free_blocks == 11, "more than the 9 that it wants"
    assert loop.scheduler.reserve(next_one, 0.0) is None, "but the running one will want 3 of them"
    loop.scheduler.cancel(runs.key)
    assert loop.scheduler.reserve(next_one, 0.0) == 0
    loop.scheduler.cancel(next_one.key)


def test_nothing_passes_what_waits_for_blocks_unless_it_is_more_important() -> None:
    loop = decode_loop(12, SchedulerPolicy(headroom=8))
    loop.scheduler.add(attempt("runs", size=20, max_tokens=20), 0.0)
    loop.step(0.0)
    loop.scheduler.add(attempt("waits", size=30, seed=1), 0.0)
    loop.step(0.0)
    assert loop.scheduler.load.waiting_sequences == 1
    assert loop.scheduler.reserve(attempt("equal", size=2, max_tokens=2), 0.0) is None
    assert loop.scheduler.reserve(attempt("above", size=2, max_tokens=2, priority=-1), 0.0) == 0
    loop.scheduler.cancel(AttemptKey("above", 0))
    run_out(loop)
