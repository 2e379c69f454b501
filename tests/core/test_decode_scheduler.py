"""A decode worker's scheduler, stepped by hand; tokens depend on the KV that is read."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from batonlm.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Overloaded,
)
from batonlm.core.request.attempt import SequenceKey
from batonlm.core.request.request import FinishReason
from batonlm.core.scheduler.events import AttemptFailed, NewTokens
from batonlm.core.scheduler.policy import QueueLimit, SchedulerPolicy
from tests.core.attempts import (
    EOS,
    Outputs,
    attempt,
    decode_loop,
    expected,
    run,
    run_out,
)


def test_choices_can_be_cancelled_one_by_one_at_any_step() -> None:
    one = attempt(size=13, n=3, max_tokens=10)
    for steps in range(8):
        loop = decode_loop(32, SchedulerPolicy(headroom=8, token_budget=260, prefill_budget=4))
        loop.scheduler.add(one, 0.0)
        loop.scheduler.add(attempt("other", size=5, seed=1), 0.0)
        outputs = Outputs()
        for _ in range(steps):
            outputs.take(loop.step(0.0))
        for choice in range(3):
            loop.scheduler.cancel(one.key, (choice,))
            loop.idle_check()
            outputs.take(loop.step(0.0))
        loop.scheduler.cancel(one.key)
        outputs.take(run_out(loop))
        assert loop.scheduler.load.free_blocks == 32
        for choice, tokens in outputs.of(one).items():
            assert expected(one)[choice][: len(tokens)] == tokens


def test_a_cancel_in_flight_frees_when_the_step_is_done() -> None:
    loop = decode_loop(32)
    one = attempt(size=13)
    loop.scheduler.add(one, 0.0)
    loop.step(0.0)
    plan = loop.plan(0.0)
    assert plan is not None
    loop.scheduler.cancel(one.key)
    assert loop.scheduler.load.free_blocks < 32
    assert loop.apply(run(loop, plan), 0.0) == []
    assert loop.scheduler.load.free_blocks == 32


def test_local_prefill_shares_steps_under_its_budget() -> None:
    policy = SchedulerPolicy(token_budget=300, prefill_budget=8, headroom=8)
    loop = decode_loop(64, policy)
    loop.scheduler.add(attempt("first", size=40, max_tokens=30), 0.0)
    plan = loop.plan(0.0)
    assert plan is not None and plan.num_tokens == 40, "nothing runs yet: the whole budget"
    loop.apply(run(loop, plan), 0.0)
    loop.scheduler.add(attempt("second", size=40, seed=1), 0.0)
    sizes = []
    for _ in range(6):
        plan = loop.plan(0.0)
        assert plan is not None
        sizes.append(sorted(len(chunk.token_ids) for chunk in plan.chunks))
        loop.apply(run(loop, plan), 0.0)
    assert sizes == [[1, 8]] * 5 + [[1, 1]]


def test_preempted_sequences_go_on_with_the_same_tokens_and_repeat_none() -> None:
    loop = decode_loop(30, SchedulerPolicy(headroom=4))
    many = [attempt(f"r{i}", size=10, seed=i, max_tokens=40) for i in range(6)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs()
    most_running, preempted = 0, 0
    while loop.scheduler.has_work:
        before = loop.scheduler.load
        outputs.take(loop.step(0.0))
        loop.idle_check()
        after = loop.scheduler.load
        preempted += after.waiting_sequences > before.waiting_sequences
        most_running = max(most_running, after.running_sequences)
    assert most_running > 1 and preempted > 0
    for one in many:
        assert outputs.of(one) == expected(one)


def test_the_least_important_and_latest_is_preempted() -> None:
    loop = decode_loop(12, SchedulerPolicy(headroom=4))
    many = [
        attempt("important", size=8, seed=1, max_tokens=24, priority=0),
        attempt("newer", size=8, seed=2, max_tokens=24, priority=1),
        attempt("older", size=8, seed=3, max_tokens=24, priority=1),
    ]
    for one in reversed(many):
        loop.scheduler.add(one, 0.0)
    outputs = Outputs()
    order = []
    while loop.scheduler.has_work:
        outputs.take(loop.step(0.0))
        order += [key.request_id for key in sorted(outputs.ended) if key.request_id not in order]
    assert order == ["important", "older", "newer"]
    for one in many:
        assert outputs.of(one) == expected(one)


def test_no_more_sequences_than_allowed_own_blocks() -> None:
    loop = decode_loop(64, SchedulerPolicy(max_sequences=3, headroom=4))
    for index in range(5):
        loop.scheduler.add(attempt(f"r{index}", seed=index, n=1), 0.0)
    loop.step(0.0)
    assert loop.scheduler.load.running_sequences == 3
    assert loop.scheduler.reserve(attempt("more"), 0.0) is None
    with pytest.raises(InvalidArgument) as refused:
        loop.scheduler.add(attempt("wide", n=4), 0.0)
    assert refused.value.field == "n"
    run_out(loop)


def test_it_pauses_when_too_far_ahead_and_resumes_when_confirmed() -> None:
    loop = decode_loop()
    one = attempt(max_tokens=9)
    key = SequenceKey("r", 0, 0)
    outputs = Outputs()
    loop.scheduler.add(one, 0.0, max_unconfirmed=3)
    for _ in range(6):
        outputs.take(loop.step(0.0))
    assert len(outputs.tokens[key]) == 3
    loop.scheduler.confirm(key, 1)
    for _ in range(6):
        outputs.take(loop.step(0.0))
    assert len(outputs.tokens[key]) == 4
    loop.scheduler.confirm(key, 99)
    for _ in range(6):
        outputs.take(loop.step(0.0))
    assert len(outputs.tokens[key]) == 7, "what is not sampled yet cannot be confirmed"
    loop.scheduler.confirm(key, 7)
    outputs.take(run_out(loop))
    assert outputs.of(one) == expected(one)
    loop.scheduler.confirm(key, 9)


def test_a_paused_sequence_that_is_preempted_stays_within_its_limit() -> None:
    loop = decode_loop(10, SchedulerPolicy(headroom=4))
    runs = attempt("runs", size=10, seed=1, max_tokens=26)
    waits = attempt("waits", size=10, seed=2, max_tokens=8)
    loop.scheduler.add(runs, 0.0)
    loop.scheduler.add(waits, 0.0, max_unconfirmed=2)
    outputs = Outputs()
    key = SequenceKey("waits", 0, 0)
    for _ in range(40):
        outputs.take(loop.step(0.0))
    assert SequenceKey("runs", 0, 0) in outputs.ended
    assert len(outputs.tokens[key]) == 2
    assert loop.scheduler.load.waiting_sequences == 1, "it was preempted"
    for position in range(2, 9):
        loop.scheduler.confirm(key, position)
        outputs.take(loop.step(0.0))
        outputs.take(loop.step(0.0))
    outputs.take(run_out(loop))
    assert outputs.of(waits) == expected(waits)


def test_it_continues_from_accepted_tokens_at_their_position() -> None:
    whole = attempt("whole", max_tokens=10)
    tokens = expected(whole)[0]
    rest = attempt("rest", max_tokens=10, accepted=tuple(tokens[:4]))
    loop = decode_loop()
    loop.scheduler.add(rest, 0.0)
    made = [t for e in run_out(loop) if isinstance(e, NewTokens) for t in e.tokens]
    assert [t.position for t in made] == list(range(4, 10))
    assert [t.token_ids[0] for t in made] == tokens[4:]


def test_one_bad_sequence_fails_alone() -> None:
    loop = decode_loop()
    bad = replace(attempt("bad", size=2, n=2), token_ids=(5, EOS))
    good = attempt("good")
    loop.scheduler.add(bad, 0.0)
    loop.scheduler.add(good, 0.0)
    events = run_out(loop)
    failed = [event for event in events if isinstance(event, AttemptFailed)]
    assert [(f.key, f.choices) for f in failed] == [(bad.key, (0,)), (bad.key, (1,))]
    assert all(isinstance(f.error, Internal) for f in failed)
    assert Outputs().take(events).of(good) == expected(good)


def test_expired_work_is_dropped_before_it_costs_a_step() -> None:
    loop = decode_loop(12, SchedulerPolicy(headroom=8))
    loop.scheduler.add(attempt("runs", size=30, max_tokens=10), 0.0)
    loop.step(0.0)
    loop.scheduler.add(attempt("late", size=30, seed=1, remaining_s=2.0), 1.0)
    assert loop.scheduler.next_wake(1.0) == 3.0
    loop.step(1.0)
    (failed,) = [event for event in loop.step(3.0) if isinstance(event, AttemptFailed)]
    assert failed.key.request_id == "late" and isinstance(failed.error, DeadlineExceeded)
    run_out(loop)


def test_a_preempted_sequence_does_not_expire_in_the_queue() -> None:
    loop = decode_loop(10, SchedulerPolicy(headroom=4))
    many = [attempt(f"r{i}", size=8, seed=i, max_tokens=26, remaining_s=1.0) for i in range(2)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(run_out(loop))
    for one in many:
        assert outputs.of(one) == expected(one)


def test_the_queue_is_bounded() -> None:
    loop = decode_loop(64, SchedulerPolicy(limit=QueueLimit(tokens=30, sequences=4)))
    loop.scheduler.add(attempt("a", size=25), 0.0)
    loop.scheduler.add(attempt("b", size=6), 0.0)
    with pytest.raises(Overloaded):
        loop.scheduler.add(attempt("c", size=1), 0.0)


def test_what_can_never_run_is_refused() -> None:
    loop = decode_loop(8, SchedulerPolicy(headroom=8))
    with pytest.raises(ContextLengthExceeded):
        loop.scheduler.add(attempt(size=32), 0.0)
    with pytest.raises(InvalidArgument) as refused:
        loop.scheduler.reserve(attempt(size=20, n=3, max_tokens=20), 0.0)
    assert refused.value.field == "n"
    with pytest.raises(ValueError, match="prefill_budget"):
        decode_loop(8, SchedulerPolicy(prefill_budget=2))
    with pytest.raises(ValueError, match="prefill_budget"):
        decode_loop(8, SchedulerPolicy(max_sequences=256, token_budget=258))
    assert not loop.scheduler.has_work


def test_a_pool_smaller_than_the_context_shortens_the_context() -> None:
    loop = decode_loop(8, SchedulerPolicy(headroom=8))
    one = attempt(size=20, max_tokens=60)
    loop.scheduler.add(one, 0.0)
    events = run_out(loop)
    last = [e for e in events if isinstance(e, NewTokens)][-1].tokens[-1]
    assert last.finish_reason is FinishReason.LENGTH
    made = Outputs().take(events).of(one)[0]
    assert len(made) == 12 and made == expected(one)[0][:12]


@pytest.mark.parametrize("refused", ["by places", "by blocks"])
def test_behind_a_refused_input_a_step_calls_nothing_for_each_that_waits(refused: str) -> None:
    policy = SchedulerPolicy(
        max_sequences=2 if refused == "by places" else 64,
        token_budget=256,
        prefill_budget=64,
        limit=QueueLimit(10**6, 10**6),
    )

    def calls(num_waiting: int) -> int:
        loop = decode_loop(8, policy)
        for number in range(2 + num_waiting):
            loop.scheduler.add(attempt(f"r{number}", size=12, seed=number, max_tokens=40), 0.0)
        loop.step(0.0)
        count = 0

        def called(frame: object, event: str, what: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(called)
        try:
            loop.plan(0.0)
        finally:
            sys.setprofile(None)
        assert loop.scheduler.load.waiting_sequences >= num_waiting
        return count

    assert calls(500) == calls(10)
