"""A prefill worker's scheduler, stepped by hand; tokens depend on the KV that is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Overloaded,
)
from batonlm.core.request.attempt import AttemptKey
from batonlm.core.request.request import FinishReason, SamplingParams, StopParams
from batonlm.core.scheduler.events import AttemptFailed, Computed, Event, FirstTokens, Planned
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.policy import PREFILL, QueueLimit, first_come
from tests.core.attempts import EOS, VOCAB_SIZE, attempt, expected, prefill_loop, run, run_out


def planned(plan: StepPlan | None) -> list[tuple[int, int]]:
    """First and end position of each chunk."""
    return [(c.first_position, c.end_position) for c in plan.chunks] if plan else []


def firsts(events: list[Event]) -> dict[AttemptKey, FirstTokens]:
    return {event.key: event for event in events if isinstance(event, FirstTokens)}


def test_one_input_from_queue_to_token_0() -> None:
    loop = prefill_loop(policy=replace(PREFILL, batch_window_s=0.5))
    one = attempt(size=10, n=3)
    loop.scheduler.add(one, 1.0, keep=False)
    events = loop.step(2.0)
    assert events[:2] == [Planned(one.key, ((0, 3),)), Computed(one.key, 10, 0)]
    (first,) = firsts(events).values()
    assert (first.cached_tokens, first.queue_s, first.prefill_s) == (0, 1.0, 0.0)
    assert [t.key for t in first.tokens] == list(one.keys())
    assert [t.position for t in first.tokens] == [0, 0, 0]
    assert {t.key.choice: list(t.token_ids) for t in first.tokens} == {
        choice: tokens[:1] for choice, tokens in expected(one).items()
    }
    assert not loop.scheduler.has_work
    loop.idle_check()


def test_an_input_waits_for_company_only_where_there_was_some_lately() -> None:
    loop = prefill_loop(policy=replace(PREFILL, batch_window_s=0.5))
    loop.scheduler.add(attempt("lone", size=10), 1.0, keep=False)
    assert [key.request_id for key in firsts(loop.step(1.0))] == ["lone"]
    loop.scheduler.add(attempt("next", size=10, seed=1), 5.9, keep=False)
    assert loop.step(6.2) == []
    assert loop.scheduler.next_wake(6.2) == 6.4
    loop.scheduler.add(attempt("last", size=10, seed=2), 6.3, keep=False)
    assert [key.request_id for key in firsts(loop.step(6.4))] == ["next", "last"]
    loop.scheduler.add(attempt("later", size=10, seed=3), 11.4, keep=False)
    assert len(firsts(loop.step(11.4))) == 1


def test_a_full_step_does_not_wait_for_the_window() -> None:
    loop = prefill_loop(policy=replace(PREFILL, token_budget=16, batch_window_s=9.0))
    loop.scheduler.add(attempt("before", size=1), 0.0, keep=False)
    loop.step(0.0)
    loop.scheduler.add(attempt("a", size=10), 1.0, keep=False)
    assert loop.step(1.0) == []
    loop.scheduler.add(attempt("b", size=6, seed=1), 1.0, keep=False)
    assert len(firsts(loop.step(1.0))) == 2


def test_what_overflows_goes_on_in_the_next_step_chunk_by_chunk() -> None:
    loop = prefill_loop(policy=replace(PREFILL, token_budget=10, order=first_come))
    loop.scheduler.add(attempt("long", size=21), 0.0, keep=False)
    loop.scheduler.add(attempt("next", size=3, seed=1), 0.1, keep=False)
    plans = []
    while (plan := loop.plan(1.0)) is not None:
        assert plan.num_tokens <= 10
        plans.append(planned(plan))
        loop.apply(run(loop, plan), 1.0)
    assert plans == [[(0, 8)], [(8, 16)], [(16, 21), (0, 3)]], "chunks end where blocks end"


def test_the_next_chunk_is_planned_while_the_one_before_is_in_flight() -> None:
    loop = prefill_loop(policy=replace(PREFILL, token_budget=8))
    one = attempt(size=21)
    loop.scheduler.add(one, 0.0, keep=True)
    plans = [loop.plan(1.0) for _ in range(4)]
    assert [planned(plan) for plan in plans] == [[(0, 8)], [(8, 16)], [(16, 21)], []]
    assert loop.scheduler.load.waiting_tokens == 0, "all of it is launched"
    for plan in plans[:3]:
        assert plan is not None
        loop.runner.submit(plan)
    loop.scheduler.take_events()
    ends = []
    for _ in range(3):
        events = loop.apply(loop.runner.collect(), 2.0)
        loop.idle_check()
        ends += [event.num_positions for event in events if isinstance(event, Computed)]
    assert ends == [8, 16, 21], "told when they are computed, not when they are planned"
    assert firsts(events)[one.key].tokens[0].token_ids == tuple(expected(one)[0][:1])


def test_the_shortest_goes_first_until_others_have_waited_long_enough() -> None:
    def order_of(waited_s: float) -> list[tuple[int, int]]:
        loop = prefill_loop(policy=replace(PREFILL, token_budget=100))
        loop.scheduler.add(attempt("long", size=60), 0.0, keep=False)
        loop.scheduler.add(attempt("short", size=5, seed=1), waited_s, keep=False)
        return planned(loop.plan(waited_s + 1.0))

    assert order_of(0.01) == [(0, 5), (0, 60)]
    assert order_of(1.0) == [(0, 60), (0, 5)]


def test_priority_classes_come_first() -> None:
    loop = prefill_loop()
    loop.scheduler.add(attempt("late", size=5, priority=1), 0.0, keep=False)
    loop.scheduler.add(attempt("soon", size=60, seed=1, priority=0), 0.0, keep=False)
    assert planned(loop.plan(1.0)) == [(0, 60), (0, 5)]


def test_kept_kv_stays_until_it_is_released_and_is_then_found_again() -> None:
    loop = prefill_loop(num_blocks=16)
    one = attempt(size=20)
    loop.scheduler.add(one, 0.0, keep=True)
    (told,) = [event for event in loop.step(1.0) if isinstance(event, Planned)]
    assert loop.scheduler.load.free_blocks == 11
    assert told.extents == ((0, 5),)
    loop.scheduler.release(one.key)
    loop.scheduler.release(one.key)
    assert loop.scheduler.load.free_blocks == 16
    again = replace(one, request_id="again")
    loop.scheduler.add(again, 2.0, keep=False)
    events = loop.step(3.0)
    assert Computed(again.key, 20, 16) in events, "the last position is always computed"
    assert firsts(events)[again.key].tokens[0].token_ids == tuple(expected(one)[0][:1])
    loop.idle_check()


def test_released_before_token_0_it_goes_on_and_is_not_kept() -> None:
    loop = prefill_loop(policy=replace(PREFILL, token_budget=8))
    one = attempt(size=20)
    loop.scheduler.add(one, 0.0, keep=True)
    loop.step(1.0)
    loop.scheduler.release(one.key)
    assert one.key in firsts(run_out(loop, 1.0))


def test_cancel_frees_at_any_point() -> None:
    loop = prefill_loop(num_blocks=16, policy=replace(PREFILL, token_budget=8))
    one = attempt(size=20)
    for steps in range(4):
        loop.scheduler.add(one, 0.0, keep=True)
        for _ in range(steps):
            loop.step(1.0)
        loop.scheduler.cancel(one.key)
        loop.scheduler.cancel(one.key)
        assert loop.scheduler.load.free_blocks == 16
        assert not loop.scheduler.has_work
        loop.idle_check()


def test_cancel_while_its_step_is_in_flight_frees_when_the_step_is_done() -> None:
    loop = prefill_loop(num_blocks=16)
    one = attempt(size=20)
    loop.scheduler.add(one, 0.0, keep=False)
    plan = loop.plan(1.0)
    assert plan is not None
    loop.scheduler.take_events()
    loop.scheduler.cancel(one.key)
    assert loop.scheduler.load.free_blocks == 11
    assert loop.apply(run(loop, plan), 1.0) == []
    assert loop.scheduler.load.free_blocks == 16
    loop.idle_check()


def test_an_ungranted_receiver_pins_only_its_share_and_holds_up_nobody() -> None:
    loop = prefill_loop(num_blocks=20)
    loop.scheduler.live_receivers = 2
    for name, receiver in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
        one = attempt(name, size=16, seed=ord(name))
        loop.scheduler.add(one, 0.0, keep=True, receiver=receiver)
    started = {key.request_id for key in firsts(loop.step(1.0))}
    assert started == {"a", "b", "d"}, "8 of 10 blocks are pinned for x, 12 would be too many"
    assert loop.step(2.0) == []
    assert loop.scheduler.next_wake(2.0) is None, "only a call can help"
    loop.scheduler.grant(AttemptKey("a", 0))
    assert {key.request_id for key in firsts(loop.step(3.0))} == {"c"}


def test_at_least_one_ungranted_attempt_may_start_whatever_its_size() -> None:
    loop = prefill_loop(num_blocks=20)
    loop.scheduler.live_receivers = 10
    loop.scheduler.add(attempt("a", size=60), 0.0, keep=True, receiver="x")
    assert len(firsts(loop.step(1.0))) == 1


def test_an_input_starved_of_blocks_lets_no_other_start() -> None:
    policy = replace(PREFILL, starving_after_s=5.0, order=first_come)
    loop = prefill_loop(num_blocks=20, policy=policy)
    kept = attempt("kept", size=40)
    loop.scheduler.add(kept, 0.0, keep=True)
    loop.step(1.0)
    loop.scheduler.add(attempt("big", size=60, seed=1), 1.0, keep=False)
    loop.scheduler.add(attempt("small", size=8, seed=2), 1.0, keep=False)
    assert [key.request_id for key in firsts(loop.step(2.0))] == ["small"]
    loop.scheduler.add(attempt("tiny", size=4, seed=3), 6.0, keep=False)
    assert loop.step(7.0) == []
    loop.scheduler.release(kept.key)
    assert [key.request_id for key in firsts(loop.step(8.0))] == ["big", "tiny"]


def test_expired_work_is_dropped_before_it_costs_a_step() -> None:
    loop = prefill_loop(policy=replace(PREFILL, batch_window_s=5.0))
    loop.scheduler.add(attempt("before"), 0.0, keep=False)
    loop.step(0.0)
    one = attempt(remaining_s=2.0, n=2)
    loop.scheduler.add(one, 1.0, keep=True)
    assert loop.scheduler.next_wake(1.0) == 3.0
    (failed,) = loop.step(3.0)
    assert isinstance(failed, AttemptFailed) and failed.choices == (0, 1)
    assert isinstance(failed.error, DeadlineExceeded)
    assert not loop.scheduler.has_work


def test_the_queue_is_bounded_in_tokens_and_sequences() -> None:
    loop = prefill_loop(policy=replace(PREFILL, limit=QueueLimit(tokens=30, sequences=4)))
    loop.scheduler.add(attempt("a", size=60), 0.0, keep=False)
    with pytest.raises(Overloaded) as refused:
        loop.scheduler.add(attempt("b", size=1), 0.0, keep=False)
    assert refused.value.retry_after_s is not None
    loop.step(1.0)
    loop.scheduler.add(attempt("c", size=2, n=3), 1.0, keep=False)
    with pytest.raises(Overloaded):
        loop.scheduler.add(attempt("d", size=2, n=2), 1.0, keep=False)
    assert loop.scheduler.load.waiting_sequences == 3
    assert loop.scheduler.load.waiting_tokens == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (5, VOCAB_SIZE)}, "token_ids"),
        ({"token_ids": (5, -1)}, "token_ids"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 11}, "num_prompt_tokens"),
        ({"choices": ()}, "choices"),
        ({"choices": (1, 1)}, "choices"),
        ({"num_prompt_tokens": 2}, "max_tokens"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))}, "logit_bias"),
        ({"stop": StopParams(9, stop_token_ids=(VOCAB_SIZE,))}, "stop_token_ids"),
    ],
)
def test_bad_attempts_are_refused_by_field(change: dict[str, object], field: str) -> None:
    loop = prefill_loop()
    with pytest.raises(InvalidArgument) as refused:
        loop.scheduler.add(replace(attempt(size=10), **change), 0.0, keep=False)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert not loop.scheduler.has_work


def test_inputs_that_can_never_fit_are_refused() -> None:
    with pytest.raises(ContextLengthExceeded):
        prefill_loop().scheduler.add(attempt(size=96), 0.0, keep=False)
    small = prefill_loop(num_blocks=4)
    with pytest.raises(ContextLengthExceeded):
        small.scheduler.add(attempt(size=17), 0.0, keep=False)
    small.scheduler.add(attempt(size=16), 0.0, keep=False)
    assert len(firsts(small.step(1.0))) == 1


def test_an_attempt_runs_once_at_a_time() -> None:
    loop = prefill_loop()
    loop.scheduler.add(attempt(), 0.0, keep=False)
    with pytest.raises(InvalidArgument):
        loop.scheduler.add(attempt(), 0.0, keep=False)


def test_one_bad_input_fails_alone() -> None:
    loop = prefill_loop()
    bad = replace(attempt("bad", size=2), token_ids=(5, EOS))
    loop.scheduler.add(bad, 0.0, keep=True)
    loop.scheduler.add(attempt("good"), 0.0, keep=False)
    events = loop.step(1.0)
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert failed.key == bad.key and isinstance(failed.error, Internal)
    assert [key.request_id for key in firsts(events)] == ["good"]
    held = loop.runner.num_blocks - loop.scheduler.load.free_blocks
    assert held, "its blocks may be copied just now"
    assert not loop.scheduler.load.waiting_tokens
    loop.scheduler.cancel(bad.key)
    assert not run_out(loop, 1.1)


def test_token_0_can_end_a_choice() -> None:
    loop = prefill_loop(eos_every=1)
    loop.scheduler.add(attempt("eos"), 0.0, keep=False)
    loop.scheduler.add(attempt("length", max_tokens=1, ignore_eos=True), 0.0, keep=False)
    first = {key.request_id: f.tokens[0] for key, f in firsts(run_out(loop, 1.0)).items()}
    assert (first["eos"].finish_reason, first["eos"].stop_token_id) == (FinishReason.STOP, 3)
    assert first["length"].finish_reason is FinishReason.LENGTH


def test_results_are_applied_in_order() -> None:
    loop = prefill_loop()
    for name in "ab":
        loop.scheduler.add(attempt(name, seed=ord(name)), 0.0, keep=False)
        plan = loop.plan(1.0)
        assert plan is not None
        loop.runner.submit(plan)
    first, second = loop.runner.collect(), loop.runner.collect()
    with pytest.raises(Internal):
        loop.apply(second, 1.0)
    assert loop.apply(first, 1.0) and loop.apply(second, 1.0)


def test_a_budget_below_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget"):
        prefill_loop(policy=replace(PREFILL, token_budget=3))
