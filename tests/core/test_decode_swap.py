"""Scheduler with swap memory: KV is moved out and back, and only the counts show it."""

from __future__ import annotations

import pytest

from batonlm.core.request.attempt import Attempt, AttemptKey, SequenceKey
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.events import AttemptFailed
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan, StepResult
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.sequence import SequenceState
from tests.core.attempts import Outputs, attempt, decode_loop, expected, run, run_out

TIGHT = SchedulerPolicy(headroom=4)


def long_ones(count: int, size: int = 22) -> list[Attempt]:
    """Each fits the pool of these tests alone; all of them together do not."""
    return [attempt(f"r{i}", size=size, seed=i, max_tokens=30) for i in range(count)]


def swap_loop(host: int, disk: int = 0, *, depth: int = 1) -> EngineLoop:
    return decode_loop(20, TIGHT, num_swap_blocks=(host, disk), depth=depth)


def states(loop: EngineLoop) -> dict[str, SequenceState]:
    roster = loop.scheduler.sequences
    found = [*roster.running.values(), *(s for w in roster.waiting for s in w.sequences)]
    return {sequence.key.request_id: sequence.state for sequence in found}


def until_swapped(loop: EngineLoop, outputs: Outputs) -> SequenceKey:
    """Steps until a sequence's KV is in swap memory; returns which."""
    for _ in range(200):
        outputs.take(loop.step(0.0))
        loop.idle_check()
        for name, state in states(loop).items():
            if state is SequenceState.SWAPPED:
                return SequenceKey(name, 0, 0)
    raise AssertionError("nothing was swapped")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("host", "disk", "kind"), [(40, 0, "swap_host"), (0, 40, "swap_disk")])
def test_a_swapped_sequence_goes_on_without_computing_anything_again(
    host: int, disk: int, kind: str, depth: int
) -> None:
    loop = swap_loop(host, disk, depth=depth)
    many = long_ones(3)
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs()
    prefilled = 0
    while loop.scheduler.has_work:
        plan = loop.plan(0.0) if loop.has_room else None
        if plan is not None:
            prefilled += plan.work.prefill
            loop.submit(plan)
        else:
            _, result = loop.collect()
            outputs.take(loop.apply(result, 0.0))
        loop.idle_check()
    assert loop.scheduler.preemptions[kind] > 0
    assert set(loop.scheduler.preemptions) == {kind}
    assert prefilled == sum(len(one.token_ids) for one in many)
    for one in many:
        assert outputs.of(one) == expected(one)
    space = loop.scheduler.sequences.swap
    assert space.num_free == (host, disk) and space.num_used == (0, 0)


def test_disk_takes_what_the_host_has_no_room_for_and_the_rest_is_computed_again() -> None:
    for swap, kinds in (((7, 12), {"swap_host", "swap_disk"}), ((4, 4), {"recompute"})):
        loop = decode_loop(20, SchedulerPolicy(headroom=1), num_swap_blocks=swap)
        many = long_ones(3, size=18)
        for one in many:
            loop.scheduler.add(one, 0.0)
        outputs = Outputs().take(run_out(loop))
        assert set(loop.scheduler.preemptions) == kinds
        for one in many:
            assert outputs.of(one) == expected(one)


def test_a_cancel_while_swapped_gives_everything_back() -> None:
    loop = swap_loop(40, depth=2)
    for one in long_ones(3):
        loop.scheduler.add(one, 0.0)
    key = until_swapped(loop, Outputs())
    assert loop.scheduler.load.swap_used[0] > 0
    loop.scheduler.cancel(AttemptKey(key.request_id, key.attempt))
    loop.idle_check()
    run_out(loop)
    assert loop.scheduler.load.free_blocks == 20
    assert loop.scheduler.load.swap_free == (40, 0)


def test_what_the_prefix_cache_still_has_is_not_moved_back() -> None:
    loop = swap_loop(40)
    shared = [attempt(f"r{i}", size=22, max_tokens=30) for i in range(5)]
    for one in shared:
        loop.scheduler.add(one, 0.0)
    moved_out = moved_in = 0
    outputs = Outputs()
    while loop.scheduler.has_work:
        plan = loop.plan(0.0)
        assert plan is not None
        moved_out += sum(len(swap.blocks) for swap in plan.swap_out)
        moved_in += sum(len(swap.blocks) for swap in plan.swap_in)
        outputs.take(loop.apply(run(loop, plan), 0.0))
    assert 0 < moved_in < moved_out, "the others' blocks of the same prompt were still there"
    for one in shared:
        assert outputs.of(one) == expected(one)


def test_kv_that_does_not_come_back_is_computed_again() -> None:
    for depth in (1, 2):
        loop = decode_loop(
            20, TIGHT, num_swap_blocks=(40, 0), lost_swap_blocks=range(40), depth=depth
        )
        many = long_ones(3)
        for one in many:
            loop.scheduler.add(one, 0.0)
        events = run_out(loop)
        assert not [event for event in events if isinstance(event, AttemptFailed)]
        assert loop.scheduler.preemptions["recompute"] > 0
        outputs = Outputs().take(events)
        for one in many:
            assert outputs.of(one) == expected(one)


@pytest.mark.parametrize(
    ("host", "state"), [(40, SequenceState.SWAPPED), (12, SequenceState.QUEUED)]
)
def test_kv_that_does_not_come_back_is_no_fault_of_one_that_was_preempted_again(
    host: int, state: SequenceState
) -> None:
    """It was before the step that should have brought it was done. What is moved out then, if
    there is room for it, is nobody's KV."""
    loop = decode_loop(24, TIGHT, num_swap_blocks=(host, 0), lost_swap_blocks=range(host), depth=2)
    # Whose rows there always are, so that steps are made in which something is only moved.
    beside = attempt("beside", size=2, seed=5, max_tokens=40)
    low = attempt("low", size=40, max_tokens=20, priority=2)
    high = attempt("high", size=40, seed=1, max_tokens=4, priority=1)
    higher = attempt("higher", size=40, seed=2, max_tokens=4, priority=1)
    outputs = Outputs()
    loop.scheduler.add(beside, 0.0)
    loop.scheduler.add(low, 0.0)
    while len(outputs.tokens.get(low.keys()[0], ())) < 4:
        outputs.take(loop.step(0.0))
    loop.scheduler.add(high, 0.0)
    while (plan := loop.plan(0.0)) is None or not plan.swap_in:
        if plan is not None:
            loop.submit(plan)
        if plan is None or not loop.has_room:
            outputs.take(loop.apply(loop.collect()[1], 0.0))
    loop.submit(plan)
    loop.scheduler.add(higher, 0.0)
    if not loop.has_room:
        outputs.take(loop.apply(loop.collect()[1], 0.0))
    plan = loop.plan(0.0)
    assert plan is not None and states(loop)["low"] is state
    loop.submit(plan)
    events = run_out(loop)
    assert not [event for event in events if isinstance(event, AttemptFailed)]
    outputs.take(events)
    for one in (beside, low, high, higher):
        assert outputs.of(one) == expected(one)
    loop.idle_check()
    assert loop.scheduler.load.swap_free == (host, 0)


def test_a_token_in_flight_counts_though_its_sequence_was_swapped_meanwhile() -> None:
    loop = swap_loop(40, depth=2)
    penalty = SamplingParams(presence_penalty=0.5)
    many = [
        attempt(f"r{i}", size=22, seed=i, max_tokens=30, sampling=penalty if i == 2 else None)
        for i in range(3)
    ]
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(run_out(loop))
    assert loop.scheduler.preemptions["swap_host"] > 0
    for one in many:
        assert outputs.of(one) == expected(one)


class Priced:
    """Drives a loop over a machine where moving a block and prefilling a position take so long."""

    def __init__(self, loop: EngineLoop, block_s: float, position_s: float):
        self.loop, self.block_s, self.position_s = loop, block_s, position_s

    def run_out(self) -> None:
        while self.loop.scheduler.has_work:
            plan = self.loop.plan(0.0)
            assert plan is not None
            result = run(self.loop, plan)
            self.loop.scheduler.observe(plan, 0.001 + plan.work.prefill * self.position_s)
            self.loop.apply(self.timed(plan, result), 0.0)

    def timed(self, plan: StepPlan, result: StepResult) -> StepResult:
        moved = sum(len(swap.blocks) for swap in (*plan.swap_out, *plan.swap_in))
        return StepResult(result.step, result.tokens, result.failed, moved * self.block_s)


@pytest.mark.parametrize(
    ("block_s", "position_s", "cheaper"), [(1e-4, 1e-3, "swap_host"), (1.0, 1e-6, "recompute")]
)
def test_the_cheaper_way_is_taken_once_both_were_measured(
    block_s: float, position_s: float, cheaper: str
) -> None:
    loop = swap_loop(60)
    for batch in range(3):
        for i in range(4):
            one = attempt(f"{batch}.{i}", size=22, seed=4 * batch + i, max_tokens=30)
            loop.scheduler.add(one, 0.0)
    Priced(loop, block_s, position_s).run_out()
    counts = loop.scheduler.preemptions
    other = "recompute" if cheaper == "swap_host" else "swap_host"
    assert counts[cheaper] > counts.get(other, 0)
