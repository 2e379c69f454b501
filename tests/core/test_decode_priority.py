"""Scheduler when something more important arrives, and when steps have to be short."""

from __future__ import annotations

import pytest

from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.events import Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import PENDING, StepPlan, StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from tests.core.attempts import (
    Outputs,
    attempt,
    decode_loop,
    expected,
    fill_in,
    handed_over,
    run,
    run_out,
)


def steps(loop: EngineLoop, count: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        events += loop.step(0.0)
        loop.idle_check()
    return events


def running(loop: EngineLoop) -> set[str]:
    return {sequence.key.request_id for sequence in loop.scheduler.sequences.running.values()}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("swap", "kind"), [((40, 0), "swap_host"), ((0, 0), "recompute")])
def test_what_is_more_important_and_does_not_fit_pushes_the_latest_out(
    swap: tuple[int, int], kind: str, depth: int
) -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=4), num_swap_blocks=swap, depth=depth)
    lesser = [attempt(f"l{i}", size=22, seed=i, max_tokens=9, priority=1) for i in range(2)]
    for one in lesser:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(steps(loop, 3))
    assert running(loop) == {"l0", "l1"}
    urgent = attempt("urgent", size=22, seed=7, max_tokens=9)
    loop.scheduler.add(urgent, 0.0)
    outputs.take(steps(loop, 3))
    assert running(loop) == {"l0", "urgent"}
    assert loop.scheduler.preemptions == {kind: 1}
    outputs.take(run_out(loop))
    for one in (*lesser, urgent):
        assert outputs.of(one) == expected(one)


@pytest.mark.parametrize("more_run", [False, True])
def test_a_step_that_stops_all_that_runs_computes_as_much_as_one_in_which_nothing_runs(
    more_run: bool,
) -> None:
    policy = SchedulerPolicy(max_sequences=8, token_budget=40, prefill_budget=4, headroom=4)
    loop = decode_loop(16, policy)
    loop.scheduler.add(attempt("lesser", size=30, max_tokens=30, priority=1), 0.0)
    if more_run:
        loop.scheduler.add(attempt("equal", size=4, seed=1, max_tokens=30), 0.0)
    steps(loop, 3)
    urgent = attempt("urgent", size=36, seed=7, max_tokens=9)
    loop.scheduler.add(urgent, 0.0)
    plan = loop.plan(0.0)
    assert plan is not None and loop.scheduler.preemptions == {"recompute": 1}
    assert plan.work.prefill == (4 if more_run else 36)


def test_equal_priority_pushes_nobody_out() -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=4))
    for name in ("a", "b"):
        loop.scheduler.add(attempt(name, size=22, seed=ord(name), max_tokens=8), 0.0)
    steps(loop, 2)
    loop.scheduler.add(attempt("late", size=22, seed=9), 0.0)
    assert loop.scheduler.reserve(attempt("more", size=22, seed=8), 0.0) is None
    steps(loop, 2)
    assert running(loop) == {"a", "b"} and not loop.scheduler.preemptions
    run_out(loop)


def test_nobody_is_pushed_out_when_that_would_not_make_enough_room() -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=4))
    loop.scheduler.add(attempt("equal", size=30, seed=1, max_tokens=6), 0.0)
    loop.scheduler.add(attempt("lesser", size=12, seed=2, max_tokens=6, priority=1), 0.0)
    steps(loop, 2)
    loop.scheduler.add(attempt("urgent", size=44, seed=3, max_tokens=4), 0.0)
    steps(loop, 1)
    assert running(loop) == {"equal", "lesser"} and not loop.scheduler.preemptions
    run_out(loop)


def test_places_are_taken_from_the_less_important_too() -> None:
    loop = decode_loop(64, SchedulerPolicy(max_sequences=2, headroom=4))
    for i in range(2):
        loop.scheduler.add(attempt(f"l{i}", seed=i, priority=1), 0.0)
    steps(loop, 2)
    loop.scheduler.add(attempt("urgent", seed=7), 0.0)
    steps(loop, 1)
    assert running(loop) == {"l0", "urgent"}
    run_out(loop)


def test_a_reservation_pushes_out_the_less_important_but_moves_no_kv() -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=4), num_swap_blocks=(40, 0))
    lesser = [attempt(f"l{i}", size=22, seed=i, max_tokens=9, priority=1) for i in range(2)]
    for one in lesser:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(steps(loop, 3))
    urgent = attempt("urgent", size=22, seed=7, max_tokens=9)
    first, kv = handed_over(urgent)
    assert loop.scheduler.reserve(urgent, 0.0) == 0
    fill_in(loop, urgent, 0, kv)
    loop.scheduler.admit(urgent.key, first.tokens, 0.0)
    assert loop.scheduler.preemptions == {"recompute": 1}, "its blocks are written at once"
    outputs.take(run_out(loop))
    for one in (*lesser, urgent):
        assert outputs.of(one) == expected(one)


def test_room_that_comes_free_with_the_steps_in_flight_is_kept_for_who_asked() -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=4), depth=2)
    lesser = [attempt(f"l{i}", size=22, seed=i, max_tokens=9, priority=1) for i in range(2)]
    for one in lesser:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(steps(loop, 3))
    assert loop.in_flight
    urgent = attempt("urgent", size=22, seed=7, max_tokens=9)
    assert loop.scheduler.reserve(urgent, 0.0) is None
    assert loop.scheduler.making_room(urgent.key, 0.0)
    assert loop.scheduler.preemptions == {"recompute": 1}
    equal = attempt("equal", size=4, seed=8, max_tokens=2)
    assert loop.scheduler.reserve(equal, 0.0) is None
    assert not loop.scheduler.making_room(equal.key, 0.0)
    outputs.take(steps(loop, 3))
    assert running(loop) == {"l0"}, "who gave the room does not take it back"
    first, kv = handed_over(urgent)
    assert loop.scheduler.reserve(urgent, 0.0) == 0
    assert not loop.scheduler.making_room(urgent.key, 0.0)
    fill_in(loop, urgent, 0, kv)
    loop.scheduler.admit(urgent.key, first.tokens, 0.0)
    outputs.take(run_out(loop))
    for one in (*lesser, urgent):
        assert outputs.of(one) == expected(one)


@pytest.mark.parametrize("how", ["lapsed", "cancelled"])
def test_room_is_not_kept_for_who_does_not_come_back(how: str) -> None:
    loop = decode_loop(16, SchedulerPolicy(headroom=4), depth=2)
    for i in range(2):
        one = attempt(f"l{i}", size=22, seed=i, max_tokens=20, priority=1)
        loop.scheduler.add(one, 0.0)
    steps(loop, 3)
    urgent = attempt("urgent", size=22, seed=7)
    assert loop.scheduler.reserve(urgent, 0.0) is None
    steps(loop, 2)
    assert running(loop) == {"l0"}
    later = loop.scheduler.next_wake(0.0)
    assert later is not None
    if how == "cancelled":
        loop.scheduler.cancel(urgent.key)
        later = 0.0
    for _ in range(3):
        loop.step(later)
    assert running(loop) == {"l0", "l1"}
    assert not loop.scheduler.making_room(urgent.key, later)
    run_out(loop, later)


def seconds(work: StepWork) -> float:
    return 0.002 + 0.001 * work.rows + 0.0005 * work.prefill


def timed_steps(loop: EngineLoop, count: int) -> list[StepPlan]:
    """Runs steps on a machine of known speed; returns their plans."""
    plans = []
    for _ in range(count):
        plan = loop.plan(0.0)
        if plan is None:
            break
        plans.append(plan)
        result = run(loop, plan)
        loop.scheduler.observe(plan, seconds(plan.work))
        loop.apply(result, 0.0)
    return plans


def targeted(target_step_s: float) -> EngineLoop:
    """A loop that has learned how fast its machine is."""
    policy = SchedulerPolicy(
        max_sequences=20, token_budget=100, prefill_budget=60, headroom=4,
        target_step_s=target_step_s,
    )  # fmt: skip
    loop = decode_loop(400, policy)
    for rows in (1, 4, 2):
        for i in range(rows):
            loop.scheduler.add(attempt(f"learn{rows}.{i}", size=30, seed=i, max_tokens=12), 0.0)
        timed_steps(loop, 1000)
    return loop


def test_nothing_is_let_in_that_makes_steps_longer_than_the_target() -> None:
    for target_s, most in ((0.0075, 5), (0.0125, 10), (0.0001, 1)):
        loop = targeted(target_s)
        for i in range(12):
            loop.scheduler.add(attempt(f"r{i}", size=4, seed=20 + i, max_tokens=20), 0.0)
        plans = timed_steps(loop, 1000)
        assert max(plan.work.rows for plan in plans) == most
        assert not loop.scheduler.has_work, "one always runs, so all ended"


def test_time_of_a_step_is_taken_from_the_less_important_too() -> None:
    loop = targeted(0.0075)
    lesser = [attempt(f"l{i}", size=4, seed=20 + i, max_tokens=20, priority=1) for i in range(8)]
    for one in lesser:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(steps(loop, 3))
    assert len(running(loop)) == 5, "as many as the target allows"
    urgent = attempt("urgent", size=4, seed=40, max_tokens=20)
    loop.scheduler.add(urgent, 0.0)
    outputs.take(steps(loop, 2))
    assert "urgent" in running(loop) and len(running(loop)) == 5
    assert sum(loop.scheduler.preemptions.values()) == 1
    outputs.take(run_out(loop))
    for one in (*lesser, urgent):
        assert outputs.of(one) == expected(one)


def test_nobody_is_pushed_out_when_steps_would_be_too_long_all_the_same() -> None:
    loop = targeted(0.0075)
    for i in range(5):
        one = attempt(f"r{i}", size=4, seed=20 + i, max_tokens=20, priority=i // 4)
        loop.scheduler.add(one, 0.0)
    steps(loop, 3)
    assert len(running(loop)) == 5
    loop.scheduler.add(attempt("long", size=4, seed=40, n=4, max_tokens=4), 0.0)
    steps(loop, 2)
    assert running(loop) == {f"r{i}" for i in range(5)} and not loop.scheduler.preemptions
    run_out(loop)


def test_chunks_are_cut_so_that_steps_stay_within_the_target() -> None:
    loop = targeted(0.012)
    loop.scheduler.add(attempt("runs", size=4, seed=20, max_tokens=60), 0.0)
    timed_steps(loop, 2)
    loop.scheduler.add(attempt("long", size=80, seed=21, max_tokens=2), 0.0)
    plans = [plan for plan in timed_steps(loop, 30) if plan.work.prefill]
    assert sum(plan.work.prefill for plan in plans) == 80
    assert all(seconds(plan.work) <= 0.012 for plan in plans)
    assert max(plan.work.prefill for plan in plans) == 16, "(12 - 2 - 1) ms allow 18 positions"


def test_one_block_is_always_computed() -> None:
    loop = targeted(0.0045)
    loop.scheduler.add(attempt("runs", size=4, seed=20, max_tokens=60), 0.0)
    timed_steps(loop, 2)
    loop.scheduler.add(attempt("long", size=30, seed=21, max_tokens=2), 0.0)
    plans = [plan for plan in timed_steps(loop, 30) if plan.work.prefill]
    assert [plan.work.prefill for plan in plans] == [4] * 7 + [2]


def test_planned_ahead_every_step_but_the_first_waits_for_its_token() -> None:
    loop = decode_loop(depth=2)
    one = attempt(size=10, max_tokens=6)
    loop.scheduler.add(one, 0.0)
    inputs, made = [], []
    while loop.scheduler.has_work or loop.in_flight:
        while loop.has_room and (plan := loop.plan(0.0)) is not None:
            inputs.append([tuple(chunk.token_ids) for chunk in plan.chunks])
            loop.submit(plan)
        made += [e for e in loop.apply(loop.collect()[1], 0.0) if isinstance(e, NewTokens)]
    assert inputs == [[one.token_ids], *[[(PENDING,)]] * 5], "max_tokens is known: none too many"
    assert Outputs().take(list(made)).of(one) == expected(one)


def test_a_step_planned_ahead_of_an_end_gives_no_token() -> None:
    loop = decode_loop(depth=2, eos_every=3)
    many = [attempt(f"r{i}", size=9, seed=i, max_tokens=30) for i in range(5)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(run_out(loop))
    for one in many:
        assert outputs.of(one) == expected(one, 3)
    while loop.in_flight:
        assert loop.step(0.0) == []
    assert loop.scheduler.load.free_blocks == 64


def test_what_needs_its_history_waits_for_its_own_token_and_holds_up_nobody() -> None:
    loop = decode_loop(depth=2)
    slow = attempt("slow", seed=1, max_tokens=8, sampling=SamplingParams(presence_penalty=0.5))
    fast = attempt("fast", seed=2, max_tokens=8)
    for one in (slow, fast):
        loop.scheduler.add(one, 0.0)
    steps_of: dict[int, int] = {}
    outputs = Outputs()
    while loop.scheduler.has_work or loop.in_flight:
        while loop.has_room and (plan := loop.plan(0.0)) is not None:
            for chunk in plan.chunks:
                assert chunk.sequence_id != 0 or PENDING not in chunk.token_ids
                steps_of[chunk.sequence_id] = plan.step
            loop.submit(plan)
        outputs.take(loop.apply(loop.collect()[1], 0.0))
    assert steps_of[1] < steps_of[0]
    for one in (slow, fast):
        assert outputs.of(one) == expected(one)


def test_the_limit_of_unconfirmed_positions_counts_those_still_to_come() -> None:
    loop = decode_loop(depth=2)
    one = attempt(max_tokens=9)
    loop.scheduler.add(one, 0.0, max_unconfirmed=3)
    outputs = Outputs().take(steps(loop, 8))
    assert [len(tokens) for tokens in outputs.tokens.values()] == [3]
    (key,) = one.keys()
    loop.scheduler.confirm(key, 2)
    outputs.take(steps(loop, 8))
    assert [len(tokens) for tokens in outputs.tokens.values()] == [5]
    loop.scheduler.cancel(one.key)
    run_out(loop)
